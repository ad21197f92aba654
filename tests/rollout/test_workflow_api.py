"""Joins, `last`, tools that run once, turns of a conversation: in a real worker process."""

from __future__ import annotations

import json

import pytest
from rollout.worker_harness import (
    EOS,
    SAMPLE,
    spec,
    text_of,
    tokens_of,
    write_model,
)

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.rollout.v1.worker_pb2 import CallAnswer, WorkerCommand, WorkerSample

DONE = common_pb2.SAMPLE_STATUS_DONE
FAILED = common_pb2.SAMPLE_STATUS_FAILED
SUPERSEDED = common_pb2.SAMPLE_STATUS_SUPERSEDED
REWARD = "\ndef reward(sample):\n    return 1.0\n"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def workflow(body: str, *, before: str = "", reward: str = REWARD) -> str:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"import asyncio\n{before}\nasync def team(ctx, query):\n{lines}\n{reward}"


def say(text: str, finished: int = 0) -> CallAnswer:
    return CallAnswer(tokens=tokens_of(text), finish_reason="stop", finished_unix_ns=finished)


def failed(reason: str = "DEADLINE_EXCEEDED") -> CallAnswer:
    return CallAnswer(failure=common_pb2.Failure(reason=reason, message="no answer"))


def prompts(worker) -> list[str]:
    return [text_of(call.prompt_tokens) for call in worker.calls]


class TestJoins:
    async def test_all_gives_results_in_the_order_of_the_calls(self, bench):
        body = """
calls = [ctx.call("echo", text=t) for t in ("ab", "cd")]
outputs = await ctx.all(*calls, asyncio.sleep(0, "x"))
return [str(o) for o in outputs], await ctx.all()
"""
        _, end = await bench.one(workflow(body))
        assert json.loads(end.output_json) == [[">ba", ">dc", "x"], []]

    async def test_a_failure_of_all_cancels_the_rest(self, bench):
        body = """
from flexmarl.rollout.workflow import CallError
try:
    await ctx.all(*(ctx.call("echo", text=t) for t in ("slow", "bad", "slow")))
except CallError as error:
    return error.reason
"""
        worker, end = await bench.one(
            workflow(body), answer=lambda c: failed() if prompts_of(c) == "bad>" else None
        )
        assert json.loads(end.output_json) == "DEADLINE_EXCEEDED"
        assert sorted(worker.cut) == [f"{SAMPLE}/0:0", f"{SAMPLE}/0:2"]

    async def test_any_takes_the_first_success_and_cuts_the_rest(self, bench):
        body = """
first = await ctx.any(*(ctx.call("echo", text=t) for t in ("bad", "good", "slow")))
return await ctx.call("echo", text=first)
"""
        answers = {"bad>": failed(), "good>": say("yes"), "yes>": say("end")}
        worker, end = await bench.one(workflow(body), answer=lambda c: answers.get(prompts_of(c)))
        assert json.loads(end.output_json) == "end"
        assert worker.cut == [f"{SAMPLE}/0:2"]
        assert list(worker.calls[-1].upstream_vertex_ids) == [f"{SAMPLE}/0:1"]

    async def test_any_without_a_success_raises_what_the_first_call_did(self, bench):
        body = """
try:
    await ctx.any(ctx.call("echo", text="a"), ctx.call("echo", text="b"))
except Exception as error:
    return error.reason
"""
        answers = {"a>": failed("INVALID_ARGUMENT"), "b>": failed()}
        _, end = await bench.one(workflow(body), answer=lambda c: answers[prompts_of(c)])
        assert json.loads(end.output_json) == "INVALID_ARGUMENT"
        _, end = await bench.one(workflow("await ctx.any()"))
        assert "at least one call" in end.failure.message

    async def test_each_gives_results_as_they_come_and_raises_in_its_turn(self, bench):
        body = """
seen = []
try:
    async for output in ctx.each(*(ctx.call("echo", text=t) for t in ("a", "b", "bad", "c"))):
        seen.append(output.text)
        await ctx.call("echo", text=f"after {output}")
except Exception as error:
    seen.append(error.reason)
return seen
"""
        worker = await bench.worker(workflow(body))
        await worker.send(WorkerCommand(start=[WorkerSample(spec=spec())]))
        await until_asked(worker, 4)
        held = {prompts_of(call): call for call in worker.calls}
        await reply(worker, held["b>"], say("b1"))
        await until_asked(worker, 5)
        assert prompts(worker)[-1] == "after b1>"
        await reply(worker, held["a>"], say("a1"))
        await reply(worker, worker.calls[-1], say("ok"))
        await until_asked(worker, 6)
        assert prompts(worker)[-1] == "after a1>"
        await reply(worker, held["bad>"], failed())
        await reply(worker, worker.calls[-1], say("ok"))
        (end,) = (await worker.until_ended([SAMPLE])).values()
        assert json.loads(end.output_json) == ["b1", "a1", "DEADLINE_EXCEEDED"]
        assert worker.cut == [held["c>"].vertex_id]

    @pytest.mark.parametrize("join", ["any", "each"])
    async def test_a_repeated_run_joins_in_the_order_in_which_answers_finished(self, bench, join):
        # All stored answers are there at once: the order given would choose another winner.
        one = "first = await ctx.any(*calls)"
        each = "outputs = [output async for output in ctx.each(*calls)]\nfirst = outputs[0]"
        body = f"""
calls = [ctx.call("echo", text=t) for t in ("a", "b", "c")]
{one if join == "any" else each}
return await ctx.call("echo", text=first)
"""
        times = {"a>": 30, "b>": 20, "c>": 10}
        texts = {"a>": "1", "b>": "2", "c>": "3"}
        worker = await bench.worker(workflow(body))
        await worker.send(WorkerCommand(start=[WorkerSample(spec=spec())]))
        await until_asked(worker, 3)
        for call in worker.calls:
            text = prompts_of(call)
            worker.store(call, say(texts[text], times[text]))
        again = await bench.worker(workflow(body))
        sample = WorkerSample(spec=spec(), stored=worker.stored[SAMPLE])
        (end,) = (await again.run(sample)).values()
        assert end.status == DONE
        assert prompts(again) == ["3>"]


def prompts_of(call) -> str:
    return text_of(call.prompt_tokens)


async def until_asked(worker, num_calls: int) -> None:
    while len(worker.calls) < num_calls:
        await worker.step(lambda _: None)


async def reply(worker, call, answer: CallAnswer) -> None:
    answer.vertex_id = call.vertex_id
    await worker.send(WorkerCommand(answers=[answer]))


TWO = {
    "echo": {"policy": "p", "prompt": "{text}>", "max_tokens": 4},
    "other": {"policy": "p", "prompt": "{text}>", "max_tokens": 4},
    "third": {"policy": "q", "prompt": "{text}>", "max_tokens": 4},
}


class TestLast:
    async def test_a_policy_is_left_when_all_its_agents_are_and_no_call_is_under_way(self, bench):
        body = """
ctx.last("third")
first = asyncio.create_task(ctx.call("echo", text="a"))
await asyncio.sleep(0)
ctx.last("echo")
ctx.last("other")
await first
await ctx.tool("wait")
"""
        before = "async def wait():\n    return 1\n"
        worker = await bench.worker(
            workflow(body, before=before), agents=TWO, workflow={"tools": {"wait": "team:wait"}}
        )
        await worker.send(WorkerCommand(start=[WorkerSample(spec=spec())]))
        await until_asked(worker, 1)
        assert worker.left == {SAMPLE: ["q"]}
        await reply(worker, worker.calls[0], say("x"))
        await worker.until_ended([SAMPLE])
        assert worker.left == {SAMPLE: ["q", "p"]}

    async def test_calls_made_before_count_as_made(self, bench):
        body = """
calls = [ctx.call("echo", text=t) for t in ("a", "b")]
ctx.last("echo")
return [str(o) for o in await ctx.all(*calls)]
"""
        worker, end = await bench.one(workflow(body))
        assert end.status == DONE, end.failure
        assert worker.left == {SAMPLE: ["p"]}

    async def test_a_call_after_last_is_an_error_that_says_so(self, bench):
        body = 'ctx.last("echo")\nawait ctx.call("echo", text="a")'
        worker, end = await bench.one(workflow(body))
        assert (end.status, end.failure.reason) == (FAILED, "WORKFLOW_RAISED")
        assert "ctx.call('echo') after ctx.last('echo')" in end.failure.message
        assert worker.calls == []

    async def test_a_repeated_run_says_it_again(self, bench):
        body = 'await ctx.call("echo", text="a")\nctx.last("echo")\nawait ctx.tool("wait")'
        source = workflow(body, before="async def wait():\n    return 1\n")
        config = {"workflow": {"tools": {"wait": "team:wait"}}}
        first, _ = await bench.one(source, **config)
        second = await bench.worker(source, **config)
        await second.run(WorkerSample(spec=spec(), stored=first.stored[SAMPLE]))
        assert first.left == second.left == {SAMPLE: ["p"]}
        assert second.calls == []


COUNTING = """
from pathlib import Path
def count(folder):
    path = Path(folder) / "count"
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())
"""


class TestTools:
    @pytest.fixture
    def once(self, tmp_path):
        call = f'value = await ctx.tool("count", folder={str(tmp_path)!r}, once=True)'
        body = f'{call}\nawait ctx.call("echo", text=value)\nreturn value'
        config = {"workflow": {"tools": {"count": "team:count"}}}
        return workflow(body, before=COUNTING), config, tmp_path / "count"

    async def test_intent_and_result_are_stored_before_and_after(self, bench, once):
        source, config, counted = once
        worker, end = await bench.one(source, **config)
        assert end.status == DONE, end.failure
        intent, result = worker.tools
        assert (intent.meta.path, result.meta.path) == ("0:__once__0", "0:0")
        assert intent.meta.input_hash == result.meta.input_hash
        assert json.loads(result.payload.output) == 1
        assert [u.partition("/")[2] for u in worker.calls[0].upstream_vertex_ids] == ["0:0"]
        assert counted.read_text() == "x"

    async def test_a_stored_result_is_not_made_again(self, bench, once):
        source, config, counted = once
        first, _ = await bench.one(source, **config)
        second = await bench.worker(source, **config)
        sample = WorkerSample(spec=spec(), stored=first.stored[SAMPLE])
        (end,) = (await second.run(sample)).values()
        assert (end.status, json.loads(end.output_json)) == (DONE, 1)
        assert second.tools == []
        assert counted.read_text() == "x"

    async def test_a_crash_between_intent_and_result_fails_the_sample(self, bench, once):
        source, config, counted = once
        first, _ = await bench.one(source, **config)
        second = await bench.worker(source, **config)
        intent = first.stored[SAMPLE][0]
        caught = source.replace("    value = await", "    try: value = await").replace(
            "once=True)\n", "once=True)\n    except Exception: value = 0\n"
        )
        for text in (source, caught):
            second = await bench.worker(text, **config)
            (end,) = (await second.run(WorkerSample(spec=spec(), stored=[intent]))).values()
            assert (end.status, end.failure.reason) == (FAILED, "TOOL_RAISED")
            assert "cannot be known" in end.failure.message
        assert counted.read_text() == "x"

    async def test_what_another_run_stored_before_is_what_counts(self, bench):
        before = "def roll():\n    return 5\n"
        worker = await bench.worker(
            workflow('return await ctx.tool("roll")', before=before),
            workflow={"tools": {"roll": "team:roll"}},
        )
        worker.stored_before["0:0"] = b"3"
        (end,) = (await worker.run(WorkerSample(spec=spec()))).values()
        assert json.loads(end.output_json) == 3

    @pytest.mark.parametrize("kind", ["async", "thread"])
    async def test_a_tool_that_takes_too_long_fails_by_name(self, bench, kind):
        slow = {
            "async": "async def slow():\n    await asyncio.sleep(60)\n",
            "thread": "import time\ndef slow():\n    time.sleep(60)\n",
        }
        body = """
try:
    await ctx.tool("slow", timeout_s=0.1)
except Exception as error:
    return error.reason, error.message
"""
        worker, end = await bench.one(
            workflow(body, before=slow[kind]), workflow={"tools": {"slow": "team:slow"}}
        )
        reason, message = json.loads(end.output_json)
        assert reason == "DEADLINE_EXCEEDED"
        assert "tool 'slow'" in message
        assert "timeout_s = 0.1" in message
        assert worker.tools[0].meta.status == common_pb2.VERTEX_STATUS_FAILED

    async def test_a_tool_that_a_join_cut_is_not_an_open_intent(self, bench):
        body = """
fast = ctx.call("echo", text="a")
first = await ctx.any(ctx.tool("slow", once=True), fast)
return await ctx.call("echo", text=first)
"""
        source = workflow(body, before="async def slow():\n    await asyncio.sleep(60)\n")
        config = {"workflow": {"tools": {"slow": "team:slow"}}}
        first, end = await bench.one(source, **config)
        assert end.status == DONE, end.failure
        assert [t.meta.finish_reason for t in first.tools] == ["tool", "tool"]
        assert first.tools[1].meta.failure.reason == "CANCELLED"
        stored = [*first.tools, first.stored_row_of("0:1")]
        second = await bench.worker(source, **config)
        (end,) = (await second.run(WorkerSample(spec=spec(), stored=stored))).values()
        assert end.status == DONE, end.failure
        assert second.tools == []


CHAT = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


MERGED = {"echo": {"policy": "p", "max_tokens": 4, "merge_turns": True}}


class TestConversations:
    TALK = """
history = [{"role": "user", "content": "hi"}]
for turn in range(3):
    said = await ctx.call("echo", messages=history)
    history += [{"role": "assistant", "content": said}, {"role": "user", "content": f"t{turn}"}]
return said
"""

    async def test_each_turn_begins_with_prompt_and_response_of_the_last_one(self, bench):
        # Another sequence of tokens reads the same: "." is what the tokenizer makes of the unknown.
        said = [*tokens_of("a."), EOS]
        worker, end = await bench.one(
            workflow(self.TALK),
            agents=MERGED,
            chat_template=CHAT,
            answer=lambda _: CallAnswer(tokens=said, finish_reason="stop"),
        )
        assert end.status == DONE, end.failure
        first, second, third = (list(call.prompt_tokens) for call in worker.calls)
        assert text_of(first) == "uhi<eos>a"
        # The sampled end token is not repeated by the template.
        assert second == [*first, *said, *tokens_of("ut0"), EOS, *tokens_of("a")]
        assert third[: len(second) + 3] == [*second, *said]
        assert [c.extends_vertex_id for c in worker.calls] == [
            "", f"{SAMPLE}/0:0", f"{SAMPLE}/0:1",
        ]  # fmt: skip

    async def test_a_response_without_end_token_gets_the_templates(self, bench):
        worker, _ = await bench.one(
            workflow(self.TALK),
            agents=MERGED,
            chat_template=CHAT,
            answer=lambda _: CallAnswer(tokens=tokens_of("ab"), finish_reason="length"),
        )
        first, second, _ = (list(call.prompt_tokens) for call in worker.calls)
        assert second == [*first, *tokens_of("ab"), EOS, *tokens_of("ut0"), EOS, *tokens_of("a")]
        assert worker.calls[1].extends_vertex_id == f"{SAMPLE}/0:0"

    @pytest.mark.parametrize(
        "content",
        ["m.content | upper | lower | trim", "m.content.split('k')[-1]", "m.content ~ m.content"],
    )
    async def test_a_template_that_changes_what_was_said_wins_and_splits_the_rows(
        self, bench, content
    ):
        template = CHAT.replace("m.content", content)
        worker, end = await bench.one(
            workflow(self.TALK),
            agents=MERGED,
            chat_template=template,
            answer=lambda _: CallAnswer(tokens=[*tokens_of(" kb"), EOS], finish_reason="stop"),
        )
        assert end.status == DONE, end.failure
        seen = {"m.content | upper | lower | trim": "akb", "m.content ~ m.content": "a kb kb"}
        whole = text_of(worker.calls[1].prompt_tokens)
        assert seen.get(content, "ab") + "<eos>" in whole
        assert [c.extends_vertex_id for c in worker.calls] == ["", "", ""]

    async def test_without_merge_turns_nothing_is_compared(self, bench):
        agents = {"echo": {"policy": "p", "max_tokens": 4}}
        worker, _ = await bench.one(workflow(self.TALK), agents=agents, chat_template=CHAT)
        assert [c.extends_vertex_id for c in worker.calls] == ["", "", ""]

    async def test_the_longest_chain_is_gone_on_from(self, bench):
        body = """
a = [{"role": "user", "content": "a"}]
x = await ctx.call("echo", messages=a)
b = [*a, {"role": "assistant", "content": x}, {"role": "user", "content": "b"}]
y = await ctx.call("echo", messages=b)
await ctx.call("echo", messages=[*b, {"role": "assistant", "content": y},
                                 {"role": "user", "content": "c"}])
await ctx.call("echo", messages=[*a, {"role": "assistant", "content": x},
                                 {"role": "user", "content": "d"}])
"""
        worker, _ = await bench.one(workflow(body), agents=MERGED, chat_template=CHAT)
        extends = [c.extends_vertex_id.partition("/")[2] for c in worker.calls]
        assert extends == ["", "0:0", "0:1", "0:0"]

    async def test_system_tools_and_options_reach_the_template(self, bench):
        template = (
            "{% for t in tools or [] %}{{ t.name }} {% endfor %}"
            "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}"
            "{% if enable_thinking is defined and not enable_thinking %}nothink{% endif %}"
        )
        body = """
await ctx.call("echo", text="hi", tools=[{"name": "find"}, {"name": "buy"}])
await ctx.call("bare", messages=[{"role": "user", "content": "hi"}])
"""
        agents = {
            "echo": {
                "policy": "p", "max_tokens": 4, "prompt": "say {text}", "chat": True,
                "system": "be", "chat_options": {"enable_thinking": False},
            },
            "bare": {"policy": "p", "max_tokens": 4},
        }  # fmt: skip
        worker, end = await bench.one(workflow(body), agents=agents, chat_template=template)
        assert end.status == DONE, end.failure
        assert prompts(worker) == ["find buy sbe.usay hi.nothink", "uhi."]

    async def test_two_tool_results_in_a_row_are_rendered_as_a_whole(self, bench):
        # Case D2: each message rendered alone would end and begin a turn between the two.
        template = (
            "{% for m in messages %}"
            "{% if m.role != 'tool' or loop.first or messages[loop.index0 - 1].role != 'tool' %}"
            "{{ m.role[0] }}>{% endif %}{{ m.content }}"
            "{% if m.role != 'tool' or loop.last or loop.nextitem.role != 'tool' %}<eos>{% endif %}"
            "{% endfor %}a>"
        )
        body = """
call = await ctx.call("echo", messages=[{"role": "user", "content": "go"}])
await ctx.call("echo", messages=[
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": call},
    {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}])
"""
        worker, end = await bench.one(
            workflow(body),
            agents=MERGED,
            chat_template=template,
            answer=lambda _: CallAnswer(tokens=[*tokens_of("xy"), EOS], finish_reason="stop"),
        )
        assert end.status == DONE, end.failure
        assert prompts(worker)[1] == "u>go<eos>a>xy<eos>t>onetwo<eos>a>"
        assert worker.calls[1].extends_vertex_id == f"{SAMPLE}/0:0"

    async def test_a_system_message_of_a_plain_prompt_is_refused(self, tmp_path):
        from rollout.worker_harness import run_config

        agents = {"echo": {"policy": "p", "prompt": "{text}", "system": "be"}}
        with pytest.raises(ValueError, match=r"agents\.echo\.system: .* set chat = true"):
            run_config(write_model(tmp_path / "m"), tmp_path, agents=agents)
