"""Workers and reward processes that are killed, hang, or cannot start, under a real dispatcher."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from rollout.dispatcher_harness import user_code_of
from rollout.team_kit import TEAM, opened

from flexmarl.api.common.v1 import common_pb2
from flexmarl.client.errors import FlexMarlError
from flexmarl.core.errors import ErrorReason
from flexmarl.rollout.dispatcher.workers import START_S

DONE = common_pb2.SAMPLE_STATUS_DONE
FAILED = common_pb2.SAMPLE_STATUS_FAILED

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_workflow_that_cannot_be_imported_ends_the_run(make, tmp_path):
    async with make("import nothing_like_it\n" + TEAM) as cluster:
        await opened(cluster, tmp_path)
        status = await cluster.until(lambda s: s.HasField("fatal"))
        assert status.fatal.reason == "WORKFLOW_IMPORT_FAILED"
        assert "nothing_like_it" in status.fatal.message


IMPORTS = {
    "ends it": ("__import__('os')._exit(4)", "ended its worker 3 times in a row (exit code 4)"),
    "never ends": ("__import__('time').sleep(999)", f"has not ended within {START_S:g} s"),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["ends it", pytest.param("never ends", marks=pytest.mark.real)])
async def test_a_workflow_whose_import_ends_its_worker_or_never_ends(make, tmp_path, how):
    """Reward processes do not import it: who tells first does not depend on the machine."""
    line, said = IMPORTS[how]
    cluster = make(f"{line}\n{TEAM}", workflow={"reward": "score:reward"})
    (tmp_path / "package" / "score.py").write_text("def reward(sample): return 0.0\n")
    async with cluster:
        await opened(cluster, tmp_path)
        status = await cluster.until(lambda s: s.HasField("fatal"), timeout_s=START_S + 30)
        assert status.fatal.reason == "WORKFLOW_IMPORT_FAILED"
        assert "the workflow's modules" in status.fatal.message
        assert said in status.fatal.message


async def test_a_killed_worker_goes_on_from_what_is_stored(make, tmp_path):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        held = []

        def answer(request):
            if request.policy == "p":
                return [1, 2]
            held.append(request)
            return None

        host.answer = answer
        ids = await cluster.admit(0, groups=2, samples=2)
        await cluster.until(lambda s: s.queues["q"].num_running == 8)
        os.kill(await user_code_of(cluster, "worker"), signal.SIGKILL)
        await cluster.until(lambda s: s.counters["worker_deaths"] == 1)
        host.answer = lambda request: [1, 2]
        for request in held[:3]:  # while nobody waits for them
            host.finish(request, [1, 2])
        await cluster.until(lambda s: s.counters["reattached"] == 8)
        for request in held[3:]:
            host.finish(request, [1, 2])
        status = await cluster.until_ended()
        assert status.counters["samples_done"] == 4
        assert status.counters["replayed"] == 4
        # The same calls under the same ids: neither what was stored nor what was in progress was
        # made again.
        sent = Counter(r.attempt_id.partition("#")[0] for r in host.requests)
        assert set(sent.values()) == {1}
        for sample_id in ids:
            graph = await cluster.graph(sample_id)
            assert sorted(v.meta.path for v in graph.vertices) == ["0:0", "0:1", "0:2", "0:3"]


async def test_a_sample_that_kills_its_workers_fails_by_name_and_spares_others(make, tmp_path):
    source = TEAM.replace(
        "    left, right", "    if query['n'] == 2: __import__('os')._exit(3)\n    left, right"
    )
    async with make(source) as cluster:
        await opened(cluster, tmp_path)
        ids = await cluster.admit(0, groups=4)
        await cluster.until_ended(timeout_s=50)
        samples = await cluster.samples()
        assert [samples[i].status for i in ids] == [DONE, DONE, FAILED, DONE]
        failure = samples[ids[2]].failure
        assert failure.reason == "CHILD_DIED"
        assert ids[2] in failure.message


async def test_a_workflow_that_holds_the_interpreter_is_found_and_named(make, tmp_path):
    """A regular expression without end: no thread of its worker could say so, or end it."""
    source = TEAM.replace(
        "    left, right",
        "    if query['n'] == 1: __import__('re').match('(a+)+$', 'a' * 64 + 'b')\n    left, right",
    )
    async with make(source, workflow={"step_timeout_s": 0.5}) as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        # The others do not end before: alone in its worker it would be found at once.
        host.answer = lambda request: [1, 2] if request.policy == "p" else None
        ids = await cluster.admit(0, groups=3)
        await cluster.until(lambda s: s.counters["worker_deaths"] == 2, timeout_s=50)
        host.answer = lambda request: [1, 2]
        for request in host.unanswered():
            host.finish(request, [1, 2])
        status = await cluster.until_ended(timeout_s=50)
        samples = await cluster.samples()
        assert [samples[i].status for i in ids] == [DONE, FAILED, DONE]
        failure = samples[ids[1]].failure
        assert failure.reason == "WORKFLOW_RAISED"
        assert "held its worker's interpreter for longer than step_timeout_s = 0.5" in (
            failure.message
        )
        assert "(team.py:5 in team)" in failure.message
        # Found once it was alone; the others were spared.
        assert status.counters["worker_deaths"] == 3


OWN_IMPORTS = {
    "ends it": (IMPORTS["ends it"][0], "ended its process 3 times in a row (exit code 4)"),
    "never ends": IMPORTS["never ends"],
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["ends it", pytest.param("never ends", marks=pytest.mark.real)])
async def test_an_estimator_whose_import_ends_its_process_or_never_ends(make, tmp_path, how):
    """Workers do not import it: only reward processes could tell, and none came to say a word."""
    line, said = OWN_IMPORTS[how]
    cluster = make(advantage={"estimator": "own:advantages"})
    own = f"{line}\ndef advantages(rewards): return rewards\n"
    (tmp_path / "package" / "own.py").write_text(own)
    async with cluster:
        await opened(cluster, tmp_path)
        status = await cluster.until(lambda s: s.HasField("fatal"), timeout_s=START_S + 30)
        assert status.fatal.reason == "WORKFLOW_IMPORT_FAILED"
        assert "estimator own:advantages" in status.fatal.message
        assert said in status.fatal.message


HANGING = {
    "sleeps": "__import__('time').sleep(99)",
    # Holds the interpreter's lock: nothing in its own process could end it.
    "holds the lock": "__import__('re').match('(a+)+$', 'a' * 64 + 'b')",
}


@pytest.mark.parametrize("how", HANGING)
async def test_a_reward_that_never_returns_fails_its_sample_only(make, tmp_path, how):
    source = TEAM.replace(
        "    return {", f"    if sample.query['n'] == 1: {HANGING[how]}\n    return {{"
    )
    async with make(source, workflow={"reward_timeout_s": 3}) as cluster:
        await opened(cluster, tmp_path)
        ids = await cluster.admit(0, groups=3)
        status = await cluster.until_ended()
        samples = await cluster.samples()
        assert [samples[i].status for i in ids] == [DONE, FAILED, DONE]
        assert samples[ids[1]].failure.reason == "REWARD_RAISED"
        assert "reward team:reward did not return" in samples[ids[1]].failure.message
        counters = status.counters
        assert (counters["rewards"], counters["reward_failures"]) == (3, 1)
        assert counters["reward_process_deaths"] == 1
        assert counters["worker_deaths"] == 0


async def test_a_reward_that_ends_its_process_fails_its_sample_only(make, tmp_path):
    source = TEAM.replace(
        "    return {", "    if sample.query['n'] == 1: __import__('os')._exit(5)\n    return {"
    )
    async with make(source) as cluster:
        await opened(cluster, tmp_path)
        ids = await cluster.admit(0, groups=4)
        await cluster.until_ended()
        samples = await cluster.samples()
        assert [samples[i].status for i in ids] == [DONE, FAILED, DONE, DONE]
        assert "ended its process 2 times (exit code 5)" in samples[ids[1]].failure.message


ESTIMATOR = """
def advantages(rewards):
    match rewards:
        case [9.0]: __import__("time").sleep(99)
        case [8.0]: return [float("nan")]
        case [7.0]: return rewards * 2
        case [6.0]: return "no"
        case [5.0]: return None
        case [4.0]: return rewards[3]
        case [3.0]: return later()
    return tuple(r - min(rewards) for r in rewards)


async def later():
    return [0.5]
"""


async def test_an_estimator_of_the_runs_own_is_asked_and_named_when_it_fails(make, tmp_path):
    advantage = {"estimator": "team:advantages"}
    workflow = {"reward_timeout_s": 3}
    async with make(TEAM + ESTIMATOR, advantage=advantage, workflow=workflow) as cluster:
        await opened(cluster, tmp_path)

        async def ask(*scopes: list[float]) -> list[list[float]]:
            return await cluster.rollout.compute_advantages(
                cluster.run_id, "b000000a0-g0000", scopes, term=cluster.term, timeout_s=20
            )

        assert await ask([1.0, 3.0], [2.0, 2.5, 4.0]) == [[0.0, 2.0], [0.0, 0.5, 2.0]]
        assert await ask([3.0]) == [[0.5]]  # it may be async
        for reward, says in (
            (8.0, "returned nan, not a finite number"),
            (7.0, "returned 2 advantages for 1 rewards"),
            (6.0, "something else than numbers"),
            (5.0, "returned NoneType"),
            (4.0, r"raised IndexError: .*\(team.py:\d+ in advantages\)"),
            (9.0, "did not return within reward_timeout_s = 3"),
        ):
            with pytest.raises(FlexMarlError, match=f"estimator team:advantages.*{says}") as told:
                await ask([reward])
            assert told.value.reason is ErrorReason.ADVANTAGE_RAISED
        assert await ask([1.0, 2.0]) == [[0.0, 1.0]]  # by the process that took its place
        assert (await cluster.rollout.get_status(cluster.run_id)).counters["reward_failures"] == 0


async def test_a_killed_reward_process_is_replaced_and_its_samples_are_scored_again(make, tmp_path):
    source = TEAM.replace(
        "    return {",
        "    while not __import__('pathlib').Path(sample.query['go']).exists(): pass\n    return {",
    )
    async with make(source) as cluster:
        await opened(cluster, tmp_path)
        go = tmp_path / "go"
        ids = await cluster.admit(0, groups=3, query={"go": str(go)})
        await cluster.until(lambda s: s.counters["vertices"] == 12)
        os.kill(await user_code_of(cluster, "reward"), signal.SIGKILL)
        await cluster.until(lambda s: s.counters["reward_process_deaths"] == 1)
        go.touch()
        status = await cluster.until_ended()
        samples = await cluster.samples()
        assert [samples[i].status for i in ids] == [DONE] * 3
        assert status.counters["reward_failures"] == 0


ONCE = """
from pathlib import Path
def pay(folder):
    log = Path(folder) / "paid"
    log.write_text(log.read_text() + "x" if log.exists() else "x")
    while not (Path(folder) / "go").exists():
        __import__("time").sleep(0.01)
    return len(log.read_text())

async def team(ctx, query):
    paid = await ctx.tool("pay", folder=query["folder"], once=query["once"])
    return await ctx.call("plan", text=paid)

def reward(sample):
    return float(sample.output.text != "")
"""


@pytest.mark.parametrize("once", [True, False])
async def test_a_tool_that_runs_once_is_not_called_again_by_a_repeated_run(make, tmp_path, once):
    async with make(ONCE, workflow={"tools": {"pay": "team:pay"}}) as cluster:
        await opened(cluster, tmp_path)
        query = {"folder": str(tmp_path), "once": once}
        (sample_id,) = await cluster.admit(0, query=query)
        paid = tmp_path / "paid"
        await cluster.until(lambda _: paid.exists() and paid.read_text() == "x")
        os.kill(await user_code_of(cluster, "worker"), signal.SIGKILL)
        await cluster.until(lambda s: s.counters["worker_deaths"] == 1)
        (tmp_path / "go").touch()
        await cluster.until_ended()
        row = (await cluster.samples())[sample_id]
        if once:
            assert (row.status, row.failure.reason) == (FAILED, "TOOL_RAISED")
            assert paid.read_text() == "x"
        else:
            assert row.status == DONE
            assert paid.read_text() == "xx"


async def test_a_tools_stored_result_is_not_made_again(make, tmp_path):
    async with make(ONCE, workflow={"tools": {"pay": "team:pay"}}) as cluster:
        (tmp_path / "go").touch()
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        host.answer = lambda r: None
        (sample_id,) = await cluster.admit(0, query={"folder": str(tmp_path), "once": True})
        await cluster.until(lambda _: len(host.requests) == 1)
        os.kill(await user_code_of(cluster, "worker"), signal.SIGKILL)
        await cluster.until(lambda s: s.counters["worker_deaths"] == 1)
        host.answer = lambda r: [1, 2]
        host.finish(host.requests[-1], [1, 2])
        status = await cluster.until_ended()
        assert status.counters["replayed"] == 2
        assert (await cluster.samples())[sample_id].status == DONE
        assert (tmp_path / "paid").read_text() == "x"
        graph = await cluster.graph(sample_id)
        assert {v.meta.path for v in graph.vertices} == {"0:0", "0:1", "0:__once__0"}
