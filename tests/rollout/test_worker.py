"""A real worker process: ids, edges, ends, rewards, replay."""

from __future__ import annotations

import json

import pytest
from rollout.worker_harness import (
    EOS,
    SAMPLE,
    WorkerHarness,
    run_config,
    spec,
    text_of,
    tokens_of,
    write_model,
    write_team,
)

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.rollout.v1.worker_pb2 import CallAnswer, WorkerCommand, WorkerSample
from flexmarl.rollout.worker.watchdog import EXIT_STUCK

DONE = common_pb2.SAMPLE_STATUS_DONE
FAILED = common_pb2.SAMPLE_STATUS_FAILED
CANCELLED = common_pb2.SAMPLE_STATUS_CANCELLED
SUPERSEDED = common_pb2.SAMPLE_STATUS_SUPERSEDED

REWARD = """
def reward(sample):
    return 1.0
"""


pytestmark = pytest.mark.asyncio(loop_scope="module")


QUICKSORT = """
async def team(ctx, query):
    halves = await ctx.call("splitter", digits=query["digits"])
    left, right = await ctx.gather(
        ctx.call("sorter", digits=halves.text[:2], after=halves),
        ctx.call("sorter", digits=halves.text[2:], after=halves),
    )
    return await ctx.call("merger", left=left, right=right)

def reward(sample):
    assert [c.agent for c in sample.by_agent("sorter")] == ["sorter", "sorter"]
    return {"merger": float(len(sample.one("merger").text)), "sorter": 0.5}
"""

QUICKSORT_AGENTS = {
    "splitter": {"policy": "a", "prompt": "{digits}>", "max_tokens": 4},
    "sorter": {"policy": "b", "prompt": "{digits}>", "max_tokens": 2, "ignore_eos": True},
    "merger": {"policy": "c", "prompt": "{left},{right}>", "max_tokens": 4},
}


async def test_outputs_passed_on_are_edges_and_calls_have_stable_paths(bench):
    worker, end = await bench.one(QUICKSORT, query={"digits": "3102"}, agents=QUICKSORT_AGENTS)
    assert end.status == DONE, end.failure
    by_path = {call.path: call for call in worker.calls}
    assert {path: call.agent for path, call in by_path.items()} == {
        "0:0": "splitter", "0:1": "sorter", "0:2": "sorter", "0:3": "merger",
    }  # fmt: skip
    assert text_of(by_path["0:0"].prompt_tokens) == "3102>"
    assert by_path["0:0"].vertex_id == f"{SAMPLE}/0:0"
    assert list(by_path["0:2"].upstream_vertex_ids) == [f"{SAMPLE}/0:0"]
    assert list(by_path["0:3"].upstream_vertex_ids) == [f"{SAMPLE}/0:1", f"{SAMPLE}/0:2"]
    assert by_path["0:1"].policy == "b"
    assert list(by_path["0:1"].sampling.stop_token_ids) == []
    assert list(by_path["0:0"].sampling.stop_token_ids) == [EOS]
    assert by_path["0:0"].sampling.max_tokens == 4
    assert len({call.sampling.seed for call in worker.calls}) == 4
    assert dict(end.rewards.agents) == {"merger": 4.0, "sorter": 0.5}
    assert not end.rewards.HasField("team")
    assert isinstance(json.loads(end.output_json), str)


async def test_what_a_workflow_returned_is_shown_as_json_also_when_json_has_no_number_for_it(bench):
    source = "async def team(c, q):\n    return float('nan')\ndef reward(s):\n    return 1\n"
    _, end = await bench.one(source)
    assert (end.status, end.output_json) == (DONE, b'"nan"')


JITTER = (
    """
import asyncio, random

async def leaf(ctx, n):
    await asyncio.sleep(random.random() * 0.004)
    first = await ctx.call("echo", text=f"leaf {n}")
    await asyncio.sleep(random.random() * 0.004)
    return await ctx.call("echo", text=first)

async def team(ctx, query):
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(leaf(ctx, n)) for n in range(3)]
    nested = await asyncio.gather(*(asyncio.gather(leaf(ctx, n), leaf(ctx, n + 1)) for n in (5, 7)))
    late = asyncio.create_task(ctx.call("echo", text="late", key="late"))
    await asyncio.wait_for(leaf(ctx, 9), 60)
    await late
    return [t.result().text for t in tasks], ctx.random.random(), str(ctx.uuid())
"""
    + REWARD
)


async def test_ids_inputs_and_seeds_are_equal_in_every_repetition(bench):
    worker = await bench.worker(JITTER)
    ids = [f"b000000a0-g{n:04d}-s000a0" for n in range(40)]
    ends = await worker.run(*(WorkerSample(spec=spec(i)) for i in ids))
    assert {end.status for end in ends.values()} == {DONE}

    def seen(sample_id):
        return sorted(
            (c.path, tuple(c.prompt_tokens), c.sampling.seed, c.input_hash,
             tuple(u.partition("/")[2] for u in c.upstream_vertex_ids))
            for c in worker.calls
            if c.sample_id == sample_id
        )  # fmt: skip

    first = seen(ids[0])
    assert len(first) == 17
    assert all(seen(i) == first for i in ids)
    assert len({end.output_json for end in ends.values()}) == 1
    orders = {tuple(c.path for c in worker.calls if c.sample_id == i) for i in ids}
    assert len(orders) > 1  # it did run in different orders


async def test_replay_answers_from_what_is_stored_and_asks_only_for_the_rest(bench):
    source = QUICKSORT.replace(
        "return await", "when = ctx.now()\n    await ctx.tool('count', text=left)\n    return await"
    )
    source += "\nCALLS = []\ndef count(text):\n    CALLS.append(text)\n    return len(CALLS)\n"
    config = {"agents": QUICKSORT_AGENTS, "workflow": {"tools": {"count": "team:count"}}}
    first, end = await bench.one(source, query={"digits": "3102"}, **config)
    assert end.status == DONE, end.failure
    rows = first.stored[SAMPLE]
    assert len(rows) == 6
    # A worker that was killed before the last call had been stored.
    kept = [row for row in rows if row.meta.agent != "merger"]
    second = await bench.worker(source, **config)
    sample = WorkerSample(spec=spec(query={"digits": "3102"}), stored=kept)
    (again,) = (await second.run(sample)).values()
    assert again.status == DONE
    assert [c.agent for c in second.calls] == ["merger"]
    assert second.tools == []
    assert second.calls[0] == first.calls[-1]
    assert again.output_json == end.output_json


@pytest.mark.parametrize("change", ["input", "unasked"])
async def test_replay_that_diverges_is_superseded(bench, change):
    first, _ = await bench.one(QUICKSORT, query={"digits": "3102"}, agents=QUICKSORT_AGENTS)
    rows = first.stored[SAMPLE]
    if change == "input":
        rows[0].meta.input_hash = b"other"
    else:
        rows[0].meta.path = "0:9"
    worker = await bench.worker(QUICKSORT, agents=QUICKSORT_AGENTS)
    sample = WorkerSample(spec=spec(query={"digits": "3102"}), stored=rows)
    (end,) = (await worker.run(sample)).values()
    assert end.status == SUPERSEDED


async def test_a_branch_not_taken_blocks_nothing(bench):
    # Case A4: START chooses A or B; the join of both, then C and D.
    source = (
        """
import asyncio
async def team(ctx, query):
    branches = [ctx.call("echo", text="a")] if query["route"] == "a" else []
    found = await asyncio.gather(*branches)
    c = await ctx.call("echo", text="c", after=found)
    return await ctx.call("echo", text="d", after=c)
"""
        + REWARD
    )
    worker, end = await bench.one(source, query={"route": "a"})
    assert end.status == DONE
    assert [text_of(c.prompt_tokens) for c in worker.calls] == ["a>", "c>", "d>"]
    worker, end = await bench.one(source, query={"route": "none"})
    assert end.status == DONE
    assert [text_of(c.prompt_tokens) for c in worker.calls] == ["c>", "d>"]


async def test_a_sample_whose_kth_call_fails_is_failed_not_done(bench):
    # Case A6.
    def answer(call):
        if text_of(call.prompt_tokens) != "3>":
            return CallAnswer(tokens=tokens_of("ok"), finish_reason="stop")
        failure = common_pb2.Failure(reason="DEADLINE_EXCEEDED", message="no answer in time")
        return CallAnswer(failure=failure)

    source = (
        """
async def team(ctx, query):
    for n in (1, 2, 3, 4):
        await ctx.call("echo", text=n)
"""
        + REWARD
    )
    worker, end = await bench.one(source, answer=answer)
    assert end.status == FAILED
    assert end.failure.reason == "DEADLINE_EXCEEDED"
    assert "no answer in time" in end.failure.message
    assert not end.HasField("rewards")
    assert len(worker.calls) == 3


async def test_a_workflow_may_catch_a_failed_call(bench):
    source = (
        """
from flexmarl.rollout.workflow import CallError
async def team(ctx, query):
    try:
        await ctx.call("echo", text="x")
    except CallError as error:
        return error.reason
"""
        + REWARD
    )
    failure = common_pb2.Failure(reason="CHILD_DIED", message="gone")
    _, end = await bench.one(source, answer=lambda _: CallAnswer(failure=failure))
    assert (end.status, json.loads(end.output_json)) == (DONE, "CHILD_DIED")


async def test_work_that_is_no_longer_waited_for_is_cut(bench):
    source = (
        """
import asyncio
async def team(ctx, query):
    fast, slow = (asyncio.create_task(ctx.call("echo", text=t)) for t in ("fast", "slow"))
    orphan = asyncio.create_task(ctx.call("echo", text="orphan"))
    done, pending = await asyncio.wait({fast, slow}, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.sleep(0)
    return fast.result()
"""
        + REWARD
    )

    def answer(call):
        if text_of(call.prompt_tokens) == "fast>":
            return CallAnswer(tokens=tokens_of("fine"), finish_reason="length")
        return None

    worker, end = await bench.one(source, answer=answer)
    assert (end.status, json.loads(end.output_json)) == (DONE, "fine")
    assert sorted(worker.cut) == [f"{SAMPLE}/0:1", f"{SAMPLE}/0:2"]


async def test_cancelling_a_sample_cuts_its_calls(bench):
    source = "async def team(ctx, query):\n    await ctx.call('echo', text='x')\n" + REWARD
    worker = await bench.worker(source)
    await worker.send(WorkerCommand(start=[WorkerSample(spec=spec())]))
    await worker.step(lambda _: None)
    await worker.send(WorkerCommand(cancel_sample_ids=[SAMPLE, "nobody"]))
    (end,) = (await worker.until_ended([SAMPLE])).values()
    assert end.status == CANCELLED
    assert worker.cut == [f"{SAMPLE}/0:0"]


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        ("await ctx.call('ecko', text=1)", "UNKNOWN_AGENT", ["'ecko'", "its agents: echo"]),
        (
            "try:\n        await ctx.call('ecko')\n    except Exception: pass",
            "UNKNOWN_AGENT",
            ["'ecko'"],
        ),
        ("await ctx.tool('nope')", "UNKNOWN_AGENT", ["tool('nope')", "none"]),
        ("ctx.last('ecko')", "UNKNOWN_AGENT", ["ctx.last('ecko')", "its agents: echo"]),
        ("1 / 0", "WORKFLOW_RAISED", ["ZeroDivisionError", "team.py:3 in team", "team:team"]),
        (
            "async with __import__('asyncio').TaskGroup() as g:\n"
            "        g.create_task(ctx.call('echo', text='x' * 200))",
            "PROMPT_TOO_LONG",
            ["'echo'", "201", "max_tokens = 4", "64", "'p'"],
        ),
        (
            "await ctx.call('echo', txt=1)",
            "WORKFLOW_RAISED",
            ["'echo'", "{text} is missing", "'txt'"],
        ),
        (
            "await ctx.call('echo', text=1, messages=[])",
            "WORKFLOW_RAISED",
            ["messages or the template's"],
        ),
        ("await ctx.call('echo', text=1, after='x')", "WORKFLOW_RAISED", ["after=", "str"]),
        (
            "[ctx.call('echo', text=1, key='k') for _ in range(2)]",
            "WORKFLOW_RAISED",
            ["'k'", "used before"],
        ),
        (
            "await __import__('asyncio').to_thread(lambda: ctx.call('echo', text=1))",
            "WORKFLOW_RAISED",
            ["outside of the tasks of its sample"],
        ),
        ("raise __import__('asyncio').CancelledError", "WORKFLOW_RAISED", ["cancelled its own"]),
        ("raise ValueError('bad \\ud800 text')", "WORKFLOW_RAISED", ["ValueError: bad ? text"]),
    ],
)
async def test_what_goes_wrong_in_a_workflow_is_named(bench, body, reason, words):
    source = f"\nasync def team(ctx, query):\n    {body}\n" + REWARD
    _, end = await bench.one(source)
    assert end.status == FAILED
    assert end.failure.reason == reason, end.failure
    for word in words:
        assert word in end.failure.message


async def test_a_workflow_that_never_ends_fails_at_its_deadline(bench):
    source = "import asyncio\nasync def team(ctx, query):\n    await asyncio.Event().wait()\n"
    _, end = await bench.one(source + REWARD, workflow={"sample_timeout_s": 0.3})
    assert (end.status, end.failure.reason) == (FAILED, "DEADLINE_EXCEEDED")
    assert "sample_timeout_s = 0.3" in end.failure.message


IMPORTS = [
    ("import nothing_of_that_name", {}, ["'team'", "nothing_of_that_name", "team.py:1"]),
    ("x = (", {}, ["SyntaxError", "team.py:1"]),
    ("raise SystemExit(3)", {}, ["SystemExit"]),
    ("def reward(s): pass", {}, ["no function 'team'"]),
    ("def team(c, q): pass\ndef reward(s): pass", {}, ["async function"]),
    ("async def team(c, q): pass", {}, ["no function 'reward'", "workflow.reward"]),
    ("", {"entry": "team"}, ["module:function"]),
    ("async def team(c, q): pass\ndef reward(): pass", {}, ["workflow.reward", "too many"]),
    (
        "async def team(c, q): pass\ndef reward(s): pass",
        {"reward_args": {"gold": "a"}},
        ["workflow.reward_args", "'gold'"],
    ),
    (
        "async def team(c, q): pass",
        {"reward": "flexmarl.rollout.rewards:json_schema"},
        ["workflow.reward_args", "'schema'"],
    ),
    ("", {"entry": "elsewhere:team"}, ["'elsewhere'", "ModuleNotFoundError"]),
]


@pytest.mark.parametrize(("source", "workflow", "words"), IMPORTS)
async def test_a_workflow_that_cannot_be_imported_is_named(bench, source, workflow, words):
    _, ready = await bench.try_worker(source, workflow=workflow)
    assert ready.failure.reason == "WORKFLOW_IMPORT_FAILED"
    for word in words:
        assert word in ready.failure.message


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ messages[0].content }}"
)
ASKED = {"policy": "p", "prompt": "{text}", "chat": True}
TALKS = {"policy": "p"}
BROKEN_TEMPLATES = [
    ("{% if %}", ASKED, ["does not compile"]),
    ("{% if %}", TALKS, ["does not compile"]),
    ("{{ messages | nosuchfilter }}", TALKS, ["does not compile", "nosuchfilter"]),
    ("{{ 1 // 0 }}", ASKED, ["ZeroDivisionError"]),
    ("{{ strftime_now('%d %b %Y') }}", TALKS, ["strftime_now"]),
    ("{{ raise_exception('parts only') }}", ASKED, ["parts only"]),
    (NO_SYSTEM, {**ASKED, "system": "Be brief."}, ["no system role"]),
    ("{{ 'x' * (n // 0) }}", {**ASKED, "chat_options": {"n": 1}}, ["ZeroDivisionError"]),
]


@pytest.mark.parametrize(("template", "agent", "words"), BROKEN_TEMPLATES)
async def test_a_chat_template_by_which_no_call_can_be_made_is_named_before_any_sample(
    bench, template, agent, words
):
    source = "async def team(c, q): pass\ndef reward(s): pass"
    _, ready = await bench.try_worker(source, agents={"echo": agent}, chat_template=template)
    assert ready.failure.reason == "MODEL_INVALID"
    for word in ["policies.p.model", "chat template of", "'echo'", *words]:
        assert word in ready.failure.message


@pytest.mark.parametrize(
    ("template", "agent"),
    [
        (NO_SYSTEM, ASKED),
        (NO_SYSTEM, {**TALKS, "system": "Be brief."}),
        ("{{ raise_exception('wants a document') }}", TALKS),
        ("{{ messages[0].content[0].text.strip() }}", TALKS),
        ("{{ 10 // n }}", {**TALKS, "chat_options": {"n": 5}}),
        ("{% if strftime_now is defined %}{{ 1 // 0 }}{% endif %}.", ASKED),
        ("{% if %}", {"policy": "p", "prompt": "{text}"}),
    ],
)
async def test_a_chat_template_by_which_some_call_can_be_made_is_taken(bench, template, agent):
    source = "async def team(c, q): pass\ndef reward(s): pass"
    _, ready = await bench.try_worker(source, agents={"echo": agent}, chat_template=template)
    assert not ready.HasField("failure"), ready.failure


async def test_models_and_templates_that_do_not_fit_are_named(bench, tmp_path):
    source = "async def team(c, q): pass\ndef reward(s): pass"
    agents = {"echo": {"policy": "p", "prompt": "{text.__class__}"}}
    _, ready = await bench.try_worker(source, agents=agents)
    assert ready.failure.reason == "INVALID_ARGUMENT"
    assert "agents.echo.prompt" in ready.failure.message
    agents = {"echo": {"policy": "p", "prompt": "{text}", "chat": True}}
    _, ready = await bench.try_worker(source, agents=agents)
    assert ready.failure.reason == "MODEL_INVALID"
    assert "chat template" in ready.failure.message
    (tmp_path / "empty").mkdir()
    worker = await WorkerHarness.start(bench.children, tmp_path, "bare")
    package = write_team(tmp_path / "bare-package", source)
    ready = await worker.set_up(run_config(tmp_path / "empty", package), package)
    assert ready.failure.reason == "MODEL_INVALID"
    assert "tokenizer.json" in ready.failure.message


CHAT = (
    "{% for m in messages %}{{ m.role[0] }},{{ m.content }}.{% endfor %}"
    "{% if add_generation_prompt %}a,{% endif %}"
)


async def test_chat_prompts_go_through_the_models_template(bench):
    source = (
        """
async def team(ctx, query):
    first = await ctx.call("echo", text="hi")
    await ctx.call("free", messages=[{"role": "user", "content": first}])
"""
        + REWARD
    )
    agents = {
        "echo": {
            "policy": "p",
            "prompt": "say {text}",
            "chat": True,
            "system": "be",
            "max_tokens": 4,
        },
        "free": {"policy": "p", "max_tokens": 4},
    }
    answer = lambda _: CallAnswer(tokens=[*tokens_of("ok"), EOS], finish_reason="stop")  # noqa: E731
    worker, end = await bench.one(source, agents=agents, chat_template=CHAT, answer=answer)
    assert end.status == DONE, end.failure
    assert text_of(worker.calls[0].prompt_tokens) == "s,be.u,say hi.a,"
    assert text_of(worker.calls[1].prompt_tokens) == "u,ok.a,"
    assert list(worker.calls[1].upstream_vertex_ids) == [f"{SAMPLE}/0:0"]


async def test_tools_are_vertices_and_what_raises_is_a_failed_one(bench):
    source = """
import asyncio
from flexmarl.rollout.workflow import CallError

def double(n):
    return {"n": 2 * n, "pair": (1, 2)}

async def shout(text):
    await asyncio.sleep(0)
    return text.upper() + "\\ud800"

def broken():
    raise KeyError("it")

def odd():
    return object()

async def team(ctx, query):
    doubled = await ctx.tool("double", n=21)
    loud = await ctx.tool("shout", text="hey", after=doubled)
    seen = await ctx.call("echo", text=loud)
    names = []
    for name in ("broken", "odd"):
        try:
            await ctx.tool(name)
        except CallError as error:
            names.append(error.message)
    return doubled, loud.text, names, ctx.now()

def reward(sample):
    assert [t.agent for t in sample.tools] == ["double", "shout"]
    return 0.0
"""
    tools = {name: f"team:{name}" for name in ("double", "shout", "broken", "odd")}
    worker, end = await bench.one(source, workflow={"tools": tools})
    assert end.status == DONE, end.failure
    doubled, loud, names, now = json.loads(end.output_json)
    assert doubled == {"n": 42, "pair": [1, 2]}
    assert loud == "HEY\ud800"
    assert "KeyError" in names[0]
    assert "team.py:13" in names[0]
    assert "not a JSON value" in names[1]
    rows = {row.meta.agent: row for row in worker.tools}
    assert list(rows) == ["double", "shout", "broken", "odd", "now"]
    assert rows["double"].meta.kind == common_pb2.VERTEX_KIND_TOOL
    assert rows["double"].payload.tool_input == b'{"n":21}'
    assert list(rows["shout"].meta.upstream_vertex_ids) == [f"{SAMPLE}/0:0"]
    assert list(worker.calls[0].upstream_vertex_ids) == [f"{SAMPLE}/0:1"]
    assert rows["broken"].meta.status == common_pb2.VERTEX_STATUS_FAILED
    assert rows["broken"].meta.failure.reason == "TOOL_RAISED"
    assert float(rows["now"].payload.output) == now


TWO_CALLS = """
from flexmarl.rollout.workflow import Rewards
async def team(ctx, query):
    await ctx.call("echo", text="a")
    await ctx.call("echo", text="a")
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 1", {"team": 1.0}),
        ("return True", {"team": 1.0}),
        ("return {'echo': 0.5}", {"agents": {"echo": 0.5}}),
        ("return {'echo': None}", {}),
        ("return [1, 2]", {"vertices": {"0:0": 1.0, "0:1": 2.0}}),
        (
            "return Rewards(team=1, vertices={sample.calls[0]: 3, sample.calls[1].vertex_id: 4},"
            " metrics={'hits': 2})",
            {"team": 1.0, "vertices": {"0:0": 3.0, "0:1": 4.0}, "metrics": {"hits": 2.0}},
        ),
    ],
)
async def test_forms_of_rewards(bench, body, expected):
    _, end = await bench.one(TWO_CALLS + f"def reward(sample):\n    {body}\n")
    assert end.status == DONE, end.failure
    got = {
        "agents": dict(end.rewards.agents),
        "metrics": dict(end.rewards.metrics),
        "vertices": {k.partition("/")[2]: v for k, v in end.rewards.vertices.items()},
        "team": end.rewards.team if end.rewards.HasField("team") else None,
    }
    assert {k: v for k, v in got.items() if v not in ({}, None)} == expected


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        ("return float('nan')", "REWARD_INVALID", ["team", "nan"]),
        ("return {'echo': float('inf')}", "REWARD_INVALID", ["'echo'", "inf"]),
        ("return -1.7e308", "REWARD_INVALID", ["team", "-1.7e+308", "at most 1e+30"]),
        ("return None", "REWARD_INVALID", ["NoneType"]),
        ("return 'good'", "REWARD_INVALID", ["str"]),
        ("return {'ecko': 1}", "REWARD_INVALID", ["'ecko'", "echo"]),
        ("return [1]", "REWARD_INVALID", ["1 rewards for 2"]),
        ("return Rewards(vertices={'0:0': 1})", "REWARD_INVALID", ["'0:0'"]),
        ("return Rewards(metrics={'m': 'x'})", "REWARD_INVALID", ["metric 'm'"]),
        ("return Rewards(metrics={'a\\nb': 1})", "REWARD_INVALID", ["metric named 'a\\nb'"]),
        ("return Rewards(metrics={'\\ud800': 1})", "REWARD_INVALID", ["metric named '\\ud800'"]),
        ("return Rewards(metrics={'': 1})", "REWARD_INVALID", ["metric named ''"]),
        ("return Rewards(metrics={1: 1})", "REWARD_INVALID", ["metric named 1"]),
        ("return 10**400", "REWARD_INVALID", ["team 1000", "too large"]),
        (
            "import numpy\n    return numpy.complex64(1)",
            "REWARD_INVALID",
            ["complex64(1+0j), not a number"],
        ),
        (
            "return Rewards(metrics={str(n) * 99: n for n in range(9999)})",
            "REWARD_INVALID",
            ["bytes of rewards, more than 524288"],
        ),
        ("return sample.one('echo')", "REWARD_RAISED", ["2 finished calls", "team:reward"]),
        (
            "raise RuntimeError('no\\nluck')",
            "REWARD_RAISED",
            ["RuntimeError: no luck", "team.py:8"],
        ),
    ],
)
async def test_rewards_that_cannot_be_used_are_named(bench, body, reason, words):
    _, end = await bench.one(TWO_CALLS + f"\ndef reward(sample):\n    {body}\n")
    assert end.status == FAILED
    assert end.failure.reason == reason, end.failure
    assert not end.HasField("rewards")
    for word in words:
        assert word in end.failure.message, end.failure.message


async def test_a_rule_that_comes_with_the_project_is_named_in_the_config(bench):
    source = "async def team(c, q):\n    return 'I think it is $1,234.'\n"
    workflow = {"reward": "flexmarl.rollout.rewards:exact_number", "reward_args": {"gold": "n"}}
    _, end = await bench.one(source, query={"n": 1234}, workflow=workflow)
    assert (end.status, end.rewards.team) == (DONE, 1.0)
    _, end = await bench.one(source, query={"m": 1234}, workflow=workflow)
    assert (end.status, end.failure.reason) == (FAILED, "REWARD_RAISED")
    assert "no column 'n'; its columns: m" in end.failure.message


async def test_async_rewards_have_a_deadline(bench):
    source = "import asyncio\nasync def team(ctx, query): pass\nasync def reward(sample):\n    "
    _, end = await bench.one(source + "await asyncio.sleep(0)\n    return 2\n")
    assert (end.status, end.rewards.team) == (DONE, 2.0)
    late = source + "await asyncio.sleep(9)\n"
    _, end = await bench.one(late, workflow={"reward_timeout_s": 0.2})
    assert (end.status, end.failure.reason) == (FAILED, "REWARD_RAISED")
    assert "reward_timeout_s = 0.2" in end.failure.message
    own = source + "raise TimeoutError('mine')\n"
    _, end = await bench.one(own)
    assert "TimeoutError: mine" in end.failure.message


async def test_a_workflow_that_holds_the_loop_ends_its_worker_and_is_named(bench, tmp_path):
    source = "import time\nasync def team(c, q): time.sleep(60)\n" + REWARD
    worker = await bench.worker(source, workflow={"step_timeout_s": 3})
    await worker.send(WorkerCommand(start=[WorkerSample(spec=spec())]))
    assert await worker.child.wait(timeout_s=20) == EXIT_STUCK
    report = json.loads((tmp_path / "w1.json").read_text())
    assert report["sample_id"] == SAMPLE
    assert "without await for longer than step_timeout_s = 3" in report["message"]


async def test_a_workflow_that_takes_too_much_memory_ends_its_worker_and_is_named(bench, tmp_path):
    source = (
        """
import time
async def team(ctx, query):
    held = [bytearray(16 << 20) for _ in range(40)]
    time.sleep(30)
"""
        + REWARD
    )
    worker = await bench.worker(source, workflow={"worker_memory_mib": 512})
    await worker.send(WorkerCommand(start=[WorkerSample(spec=spec())]))
    assert await worker.child.wait(timeout_s=20) == EXIT_STUCK
    report = json.loads((tmp_path / "w1.json").read_text())
    assert report["sample_id"] == SAMPLE
    assert "workflow.worker_memory_mib = 512" in report["message"]


async def test_outputs_with_lone_surrogates_are_stored(bench):
    """G5: whatever text a workflow returns, the sample's end can be sent."""
    _, end = await bench.one("async def team(ctx, q):\n    return 'a\\ud800b'\n" + REWARD)
    assert end.status == DONE, end.failure
    assert json.loads(end.output_json) == "a\ud800b"


async def test_prompts_with_lone_surrogates_are_encoded(bench):
    source = "async def team(ctx, q):\n    await ctx.call('echo', text='a\\ud800b')\n" + REWARD
    worker, end = await bench.one(source)
    assert end.status == DONE, end.failure
    assert text_of(worker.calls[0].prompt_tokens) == "a.b>"


GREEDY = """
import resource

async def team(ctx, query):
    try:
        if query["what"] == "memory":
            taken = bytearray(8 << 30)
        else:
            taken = [open("/dev/null") for _ in range(100_000)]
    except (MemoryError, OSError) as error:
        taken = None
        return f"{type(error).__name__} {resource.getrlimit(resource.RLIMIT_NOFILE)}"
    return "took all"

def reward(sample):
    return 1.0
"""


async def test_a_worker_gets_no_more_than_the_service_allows(children, tmp_path):
    limits = {"address_space_mib": 4096, "open_files": 128}
    package = write_team(tmp_path / "package", GREEDY)
    config = run_config(write_model(tmp_path / "model"), package)
    worker = await WorkerHarness.start(children, tmp_path, limits=limits)
    ready = await worker.set_up(config, package)
    assert not ready.HasField("failure"), ready.failure
    said = {}
    for index, what in enumerate(("memory", "files")):
        sample_id = f"b000000a0-g0000-s00{index}a0"
        sample = WorkerSample(spec=spec(sample_id, query={"what": what}))
        end = (await worker.run(sample))[sample_id]
        assert end.status == DONE, end.failure
        said[what] = json.loads(end.output_json)
    assert said == {"memory": "MemoryError (128, 128)", "files": "OSError (128, 128)"}
