"""The dispatcher as a process, with a real store and real workers; engines are stood in for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter

import psutil
import pytest
import pytest_asyncio
from rollout.dispatcher_harness import Cluster, Services, user_code_of
from rollout.worker_harness import run_config, write_model, write_team

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1.meg_store_pb2 import ClosedSubgraph
from flexmarl.api.rollout.v1 import engine_pb2 as eng
from flexmarl.client.errors import FlexMarlError, UnavailableError
from flexmarl.client.rollout import RolloutClient
from flexmarl.core.errors import ErrorReason
from flexmarl.rollout.dispatcher.workers import START_S
from flexmarl.rollout.worker.calls import MAX_VALUE_BYTES

DONE = common_pb2.SAMPLE_STATUS_DONE
FAILED = common_pb2.SAMPLE_STATUS_FAILED

TEAM = """
import asyncio
async def team(ctx, query):
    first = await ctx.call("plan", text=query.get("n", 0))
    left, right = await asyncio.gather(
        ctx.call("work", text="l", after=first), ctx.call("work", text="r", after=first)
    )
    return await ctx.call("plan", text=left)

def reward(sample):
    return {"plan": 1.0, "work": float(len(sample.calls))}
"""
AGENTS = {
    "plan": {"policy": "p", "prompt": "{text}>", "max_tokens": 4, "timeout_s": 20},
    "work": {"policy": "q", "prompt": "{text}>", "max_tokens": 4, "timeout_s": 20},
}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def services(tmp_path_factory):
    shared = Services(tmp_path_factory.mktemp("services"), host_grace_s=1.5)
    yield shared
    shared.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def make(tmp_path, services):
    """Makes runs around one module text."""
    await services.revive()

    def build(source=TEAM, **sections) -> Cluster:
        config = run_config(
            write_model(tmp_path / "model"),
            write_team(tmp_path / "package", source),
            **{"agents": AGENTS, **sections},
        )
        return Cluster(services, config)

    return build


async def opened(cluster: Cluster, tmp_path, **host) -> None:
    await cluster.create_run(tmp_path / "data.jsonl")
    cluster.host(**host)
    await cluster.open()
    await cluster.activate(0)


async def test_a_batch_from_start_to_stored_rewards(make, tmp_path):
    policies = {"p": {"rollout": {"instances": 2, "max_concurrency": 3}}}
    async with make(policies=policies) as cluster:
        await opened(cluster, tmp_path)
        ids = await cluster.admit(0, groups=3, samples=4)
        status = await cluster.until_ended()
        samples = await cluster.samples()
        assert sorted(samples) == ids
        assert {s.status for s in samples.values()} == {DONE}
        assert dict(samples[ids[0]].rewards.agents) == {"plan": 1.0, "work": 4.0}
        assert samples[ids[0]].num_vertices == 4
        graph = await cluster.graph(ids[5])
        by_path = {v.meta.path: v for v in graph.vertices}
        assert sorted(by_path) == ["0:0", "0:1", "0:2", "0:3"]
        last = by_path["0:3"]
        assert list(last.meta.upstream_vertex_ids) == [f"{ids[5]}/0:1"]
        assert (last.meta.policy, last.meta.policy_version) == ("p", 0)
        assert last.meta.weights_hash == "hash-p-0"
        assert last.meta.trainable
        assert last.meta.instance_id in ("p-0", "p-1")
        assert len(last.payload.logprobs) == len(last.payload.response_tokens) == 4
        assert last.meta.ready_unix_ns <= last.meta.dispatched_unix_ns <= last.meta.finished_unix_ns
        host = cluster.hosts[0]
        assert len(host.requests) == 48
        assert {r.instance_id for r in host.requests} == {"p-0", "p-1", "q-0"}
        await cluster.until(lambda _: len(host.stored) == 48)
        assert status.counters["vertices"] == 48
        assert status.counters["samples_done"] == 12
        assert status.ready
        assert {i.instance_id for i in status.instances} == {"p-0", "p-1", "q-0"}
        # Starting them again changes nothing: not in this dispatcher, not in the store.
        await cluster.start(cluster.specs)
        assert (await cluster.status()).num_open_samples == 0
        assert len(host.requests) == 48


async def test_the_next_version_is_loaded_between_batches_and_pinned_to_requests(make, tmp_path):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        held = []
        host.answer = lambda request: held.append(request)
        await cluster.admit(0)
        await cluster.until(lambda s: s.queues["p"].num_running == 1)
        # Announced while a sample of version 0 is open: nobody loads it.
        await cluster.rollout.prepare_weights(
            cluster.run_id, 1, dict(cluster.manifest(1).policies), term=cluster.term
        )
        await asyncio.sleep(0.2)
        assert {load.version for load in host.loads} == {0}
        host.answer = lambda request: [1, 2]
        host.finish(held[0], [3])
        await cluster.until_ended()
        await cluster.until(lambda s: {i.version for i in s.instances} == {1})
        # A sample of version 1 waits until it is committed, whatever instances hold.
        ids = await cluster.admit(1)
        await asyncio.sleep(0.2)
        assert (await cluster.status()).num_open_samples == 1
        assert {r.version for r in host.requests} == {0}
        await cluster.activate(1)
        await cluster.until_ended()
        assert {r.version for r in host.requests[4:]} == {1}
        graph = await cluster.graph(ids[0])
        assert {v.meta.policy_version for v in graph.vertices} == {1}
        assert (graph.sample.min_version, graph.sample.max_version) == (1, 1)


async def test_refused_weights_raise_the_alarm_until_a_good_load(make, tmp_path):
    async with make() as cluster:
        await cluster.create_run(tmp_path / "data.jsonl")
        host = cluster.host()
        await cluster.open()
        await cluster.until(lambda s: len(s.instances) == 2 and "p-0" in host.statuses)
        refused = eng.InstanceStatus(
            instance_id="p-0", policies=["p"], state=eng.INSTANCE_STATE_EMPTY,
            failure=common_pb2.Failure(reason="CHECKSUM_MISMATCH", message="content is not theirs"),
        )  # fmt: skip
        host.send(instances=[refused])
        status = await cluster.until(lambda s: s.counters["weights_refused"] == 1)
        (line,) = [line for line in status.waits if line.startswith("policy p:")]
        assert "p-0: content is not theirs" in line
        await cluster.activate(0)
        status = await cluster.until(lambda s: s.ready)
        assert not any(i.HasField("failure") for i in status.instances)


@pytest.mark.parametrize(
    "mislabel", [{"version": 7}, {"weights_hash": "other"}, {"version": 0, "weights_hash": ""}]
)
async def test_results_of_other_weights_are_never_used(make, tmp_path, mislabel):
    # I4, case C1: what served is told by the result, what was asked for by the request.
    async with make() as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        host.mislabel = mislabel
        ids = await cluster.admit(0)
        await cluster.until(lambda s: s.counters["retries"] >= 1)
        host.mislabel = {}
        await cluster.until_ended()
        graph = await cluster.graph(ids[0])
        assert {v.meta.weights_hash for v in graph.vertices} == {"hash-p-0", "hash-q-0"}
        assert max(v.meta.attempt for v in graph.vertices) >= 2


async def test_request_failures_end_the_call_and_the_sample_is_failed(make, tmp_path):
    # Case A6: failed is not done, and what was finished before stays in the graph.
    async with make() as cluster:
        await opened(cluster, tmp_path)
        bad = common_pb2.Failure(reason="INVALID_ARGUMENT", message="the engine refuses it")
        cluster.hosts[0].answer = lambda r: bad if r.policy == "q" else [1, 2]
        ids = await cluster.admit(0)
        status = await cluster.until_ended()
        assert "fatal" not in {field.name for field, _ in status.ListFields()}
        graph = await cluster.graph(ids[0])
        assert graph.sample.status == FAILED
        assert graph.sample.failure.reason == "INVALID_ARGUMENT"
        assert "max_attempts = 3" in graph.sample.failure.message
        statuses = {v.meta.path: v.meta.status for v in graph.vertices}
        assert statuses["0:0"] == common_pb2.VERTEX_STATUS_DONE
        assert common_pb2.VERTEX_STATUS_FAILED in (statuses["0:1"], statuses["0:2"])
        assert not graph.sample.HasField("rewards")


async def test_a_wrong_agent_name_ends_the_run(make, tmp_path):
    source = TEAM.replace('ctx.call("work", text="l"', 'ctx.call("wrok", text="l"')
    async with make(source) as cluster:
        await opened(cluster, tmp_path)
        ids = await cluster.admit(0)
        status = await cluster.until_ended()
        assert status.fatal.reason == "UNKNOWN_AGENT"
        assert "'wrok'" in status.fatal.message
        assert "plan, work" in status.fatal.message
        assert not status.ready
        assert (await cluster.samples())[ids[0]].status == FAILED
        # A newer orchestrator, after whatever was mended, starts without it.
        await cluster.open()
        assert not (await cluster.status()).HasField("fatal")


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
    line, said = IMPORTS[how]
    async with make(f"{line}\n{TEAM}") as cluster:
        await opened(cluster, tmp_path)
        status = await cluster.until(lambda s: s.HasField("fatal"), timeout_s=START_S + 30)
        assert status.fatal.reason == "WORKFLOW_IMPORT_FAILED"
        assert said in status.fatal.message


async def test_fewer_places_than_policies_are_refused(make, tmp_path):
    async with make() as cluster:
        await cluster.create_run(tmp_path / "data.jsonl")
        await cluster.open()  # without a host it waits for one, and says so
        cluster.host(room=1)
        await cluster.until(lambda s: any(w.startswith("engine hosts: ") for w in s.waits))
        await cluster.rollout.close_run(cluster.run_id, term=cluster.term)
        with pytest.raises(FlexMarlError) as info:
            await cluster.open()
        assert info.value.reason is ErrorReason.NOT_ENOUGH_INSTANCES
        assert "2 policies (p, q)" in info.value.message


ONE_CALL = """
async def team(ctx, query):
    return await ctx.call("plan", text="x")

def reward(sample):
    return 1.0
"""


async def test_queries_and_samples_of_each_are_bounded_as_the_config_says(make, tmp_path):
    bounds = {"max_concurrent_queries": 2, "max_concurrent_samples_per_query": 3}
    async with make(ONE_CALL, rollout=bounds) as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        host.answer = lambda request: None
        ids = await cluster.admit(0, groups=4, samples=4)
        groups = [ids[n : n + 4] for n in range(0, 16, 4)]

        async def asked(expected: list[str]) -> None:
            """These and no others, however long one waits."""
            await cluster.until(lambda _: len(host.requests) >= len(expected))
            await asyncio.sleep(0.1)
            got = [r.attempt_id.partition("/")[0] for r in host.requests]
            assert sorted(got) == sorted(expected)

        def end(sample_id: str) -> None:
            (request,) = [r for r in host.requests if r.attempt_id.startswith(sample_id)]
            host.finish(request, [1])

        expected = [*groups[0][:3], *groups[1][:3]]
        await asked(expected)
        end(groups[0][0])  # its group's last one takes its place
        expected.append(groups[0][3])
        await asked(expected)
        for sample_id in groups[0][1:]:  # with its last sample a query makes room for the next
            end(sample_id)
        expected += groups[2][:3]
        await asked(expected)
        host.answer = lambda request: [1]
        for sample_id in expected[3:6] + groups[2][:3]:
            end(sample_id)
        await cluster.until_ended()
        assert {s.status for s in (await cluster.samples()).values()} == {DONE}


OWN = {
    "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    "kind": "frozen",
    "rollout": {
        "engine": "vllm", "instances": 2, "dtype": "bfloat16", "max_context": 48,
        "max_concurrency": 3, "kv_cache_bytes": 1 << 26,
        "vllm": {"tensor_parallel_size": 2, "seeded": False, "args": ["--seed", "1"]},
    },
}  # fmt: skip
OWN_AGENT = {
    "policy": "p", "prompt": "{text}>", "max_tokens": 7, "stop": ["x"], "stop_token_ids": [3],
    "structured": {"json_schema": "{}"},
}  # fmt: skip


async def test_instances_and_calls_are_as_their_policy_says(make, tmp_path):
    agents = {"plan": OWN_AGENT, "work": AGENTS["work"]}
    async with make(agents=agents, policies={"p": OWN}) as cluster:
        await opened(cluster, tmp_path)
        (sample_id,) = await cluster.admit(0)
        await cluster.until_ended()
        assert (await cluster.samples())[sample_id].status == DONE
        host = cluster.hosts[0]
        assert host.specs.keys() == {"p-0", "p-1", "q-0"}
        spec, other = host.specs["p-0"], host.specs["q-0"]
        assert (spec.engine, spec.dtype, spec.max_context) == ("vllm", "bfloat16", 48)
        assert (spec.max_concurrency, spec.options.kv_cache_bytes) == (3, 1 << 26)
        vllm = spec.options.vllm
        assert (vllm.tensor_parallel_size, vllm.seeded) == (2, False)
        assert (vllm.enforce_eager, list(vllm.args)) == (True, ["--seed", "1"])
        assert (other.engine, other.dtype, other.max_context) == ("transformers", "float32", 0)
        assert not other.options.HasField("vllm")
        by_policy = {request.policy: request.sampling for request in host.requests}
        drawn, plain = by_policy["p"], by_policy["q"]
        assert drawn.temperature == pytest.approx(0.7)
        assert (drawn.top_p, drawn.min_p) == pytest.approx((0.9, 0.1))
        assert (drawn.top_k, drawn.max_tokens) == (5, 7)
        assert list(drawn.stop) == ["x"]
        assert 3 in drawn.stop_token_ids
        assert drawn.structured.json_schema == "{}"
        assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (1.0, 1.0, 0, 0.0)
        assert not plain.stop
        assert not plain.HasField("structured")


async def test_older_terms_and_other_runs_are_refused(make, tmp_path):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        newer = await cluster.store.acquire_term(cluster.run_id, "orchestrator", holder="other")
        await cluster.rollout.open_run(cluster.run_id, term=newer, shards=cluster.shards)
        with pytest.raises(FlexMarlError) as info:
            await cluster.rollout.start_samples(cluster.run_id, [], term=cluster.term)
        assert info.value.reason is ErrorReason.TERM_STALE
        with pytest.raises(FlexMarlError) as info:
            await cluster.rollout.get_status("elsewhere")
        assert info.value.reason is ErrorReason.RUN_NOT_FOUND
        await cluster.rollout.close_run(cluster.run_id, term=newer)
        with pytest.raises(FlexMarlError) as info:
            await cluster.status()
        assert info.value.reason is ErrorReason.RUN_NOT_FOUND
        cluster.term = newer
        await cluster.rollout.open_run(cluster.run_id, term=newer, shards=cluster.shards)


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
        ids = await cluster.admit(0, groups=3)
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
    async with make(source, workflow={"reward_timeout_s": 0.6}) as cluster:
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
    workflow = {"reward_timeout_s": 0.6}
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
            (9.0, "did not return within reward_timeout_s = 0.6"),
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


LEAVING = """
from pathlib import Path
async def team(ctx, query):
    first = await ctx.call("plan", text="a")
    ctx.last("plan")
    await ctx.tool("wait", path=query["go"])
    return await ctx.call("work", text=first)

async def wait(path):
    import asyncio
    while not Path(path).exists():
        await asyncio.sleep(0.01)

def reward(sample):
    return 1.0
"""


async def left_row(cluster: Cluster, sample_id: str):
    for _ in range(500):
        row = (await cluster.samples())[sample_id]
        if row.left_policies:
            return row
        await asyncio.sleep(0.02)
    raise AssertionError("it has left nothing")


async def test_what_a_sample_has_left_is_in_its_row_while_it_is_open(make, tmp_path):
    async with make(LEAVING, workflow={"tools": {"wait": "team:wait"}}) as cluster:
        await opened(cluster, tmp_path)
        go = tmp_path / "go"
        (sample_id,) = await cluster.admit(0, query={"go": str(go)})
        await cluster.until(lambda s: s.counters["vertices"] == 1)
        row = await left_row(cluster, sample_id)
        assert row.status == common_pb2.SAMPLE_STATUS_OPEN
        assert (list(row.left_policies), list(row.used_policies)) == (["p"], ["p"])
        # A newer dispatcher admits it as if nothing had happened: it stays in the row.
        cluster.rollout_service.kill()
        await cluster.rollout_service.start()
        await cluster.open()
        await cluster.activate(0)
        await cluster.start(cluster.specs)
        await cluster.until(lambda s: s.counters["replayed"] == 1)
        assert list((await cluster.samples())[sample_id].left_policies) == ["p"]
        go.touch()
        await cluster.until_ended()
        row = (await cluster.samples())[sample_id]
        assert (row.status, list(row.used_policies)) == (DONE, ["p", "q"])


async def test_a_call_of_a_policy_that_is_closed_fails_its_sample_by_name(make, tmp_path):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        ids = await cluster.admit(0, groups=2, start=False)  # groups that come later lift a mark
        mark = ClosedSubgraph(batch=0, policy="q")
        await cluster.store.close_subgraph(cluster.run_id, [mark], term=cluster.term)
        await cluster.start(cluster.specs)
        status = await cluster.until_ended()
        assert "fatal" not in {field.name for field, _ in status.ListFields()}
        samples = await cluster.samples()
        for sample_id in ids:
            assert samples[sample_id].status == FAILED
            assert samples[sample_id].failure.reason == "SUBGRAPH_CLOSED"
            assert "'work'" in samples[sample_id].failure.message
            graph = await cluster.graph(sample_id)
            assert [v.meta.path for v in graph.vertices] == ["0:0"]


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
        await cluster.until(lambda s: s.queues["p"].num_running == 1)
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


async def test_a_killed_dispatcher_is_started_again_and_replays(make, tmp_path):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        host.answer = lambda r: [1, 2] if r.policy == "p" else None
        ids = await cluster.admit(0, groups=2)
        await cluster.until(lambda s: s.queues["q"].num_running == 4)
        children = psutil.Process(cluster.rollout_service.process.pid).children(recursive=True)
        cluster.rollout_service.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []  # I15
        # Its host goes on without it: two calls end meanwhile, two are still in progress.
        host.answer = lambda r: [1, 2]
        asked = [r for r in host.requests if r.policy == "q"]
        for request in asked[:2]:
            host.finish(request, [1, 2])
        await cluster.rollout_service.start()
        first = await cluster.open()
        await cluster.activate(0)
        await cluster.start(cluster.specs)
        await cluster.until(lambda s: s.counters["reattached"] == 4)
        for request in asked[2:]:
            host.finish(request, [1, 2])
        status = await cluster.until_ended()
        assert status.incarnation == first
        assert status.counters["replayed"] == 2
        samples = await cluster.samples()
        assert {samples[i].status for i in ids} == {DONE}
        # Every call of the batch was sent once, over both dispatchers.
        sent = Counter(r.attempt_id.partition("#")[0] for r in host.requests)
        assert set(sent.values()) == {1}
        await cluster.until(lambda _: host.in_hand == {})


RACE = """
async def team(ctx, query):
    lanes = [ctx.call("work", text=lane) for lane in (query["n"], "a", "b")]
    first = await ctx.any(*lanes)
    return await ctx.call("plan", text=first)

def reward(sample):
    return float(len(sample.calls))
"""


async def test_a_dispatcher_that_is_killed_while_a_join_cuts_the_rest_goes_on(make, tmp_path):
    """Some samples have their winner, some not; of some the others are cut already."""
    policies = {name: {"rollout": {"max_concurrency": 64}} for name in "pq"}
    async with make(RACE, policies=policies) as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        host.answer = lambda request: None
        ids = await cluster.admit(0, groups=16)
        await cluster.until(lambda s: s.queues["q"].num_running == 48)
        lanes = {r.attempt_id.partition("#")[0]: r for r in host.requests}
        for sample_id in ids[:12]:
            host.finish(lanes[f"{sample_id}/0:1"], [1, 2])
        async with asyncio.timeout(10):
            while len(host.aborts) < 6:  # noqa: ASYNC110, RUF100
                await asyncio.sleep(0)
        cluster.rollout_service.kill()
        # Meanwhile another lane of each ends: where one had won it came too late.
        for sample_id in ids:
            host.finish(lanes[f"{sample_id}/0:2"], [3, 4])
        for request in [r for r in host.requests if r.policy == "p"]:
            host.finish(request, [5])
        host.answer = lambda request: [5]
        await cluster.rollout_service.start()
        await cluster.open()
        await cluster.activate(0)
        await cluster.start(cluster.specs)
        await cluster.until_ended()
        samples = await cluster.samples()
        assert {samples[i].status for i in ids} == {DONE}
        for place, sample_id in enumerate(ids):
            graph = await cluster.graph(sample_id)
            ended = {v.meta.path: v for v in graph.vertices}
            assert len(ended) == len(graph.vertices) == 4
            (winner,) = ended["0:3"].meta.upstream_vertex_ids
            lane, tokens = ("0:1", [1, 2]) if place < 12 else ("0:2", [3, 4])
            assert winner == f"{sample_id}/{lane}"
            assert list(ended[lane].payload.response_tokens) == tokens
        # What nobody waits for is ended or let go, and nothing was asked twice.
        await cluster.until(lambda _: host.in_hand.keys() <= set(host.aborts))
        assert len({r.attempt_id for r in host.requests}) == len(host.requests)


async def test_the_store_may_go_away_in_the_middle(make, tmp_path):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        held = []
        host.answer = held.append
        ids = await cluster.admit(0, groups=3)
        await cluster.until(lambda s: s.queues["p"].num_running == 3)
        cluster.store_service.kill()
        host.answer = lambda r: [1, 2]
        for request in held:
            host.finish(request, [1, 2])
        await asyncio.sleep(0.5)
        assert (await cluster.status()).num_open_samples == 3
        assert host.stored == set()  # nothing is acknowledged that is not stored
        await cluster.store_service.start()
        await cluster.until_ended()
        assert {s.status for s in (await cluster.samples()).values()} == {DONE}
        assert len(await cluster.samples()) == len(ids)


async def test_a_host_that_comes_back_keeps_its_attempts_and_one_that_does_not_loses_them(
    make, tmp_path
):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        host.drop_stored = True
        await cluster.admit(0)
        await cluster.until_ended()
        assert len(host.unacked) == 4
        # It dials again with results that were stored: they are acknowledged, not used again.
        host.drop_stored = False
        await host.stop()
        host.start()
        await cluster.until(lambda _: len(host.stored) == 4)
        assert (await cluster.status()).counters["vertices"] == 4
        # Now it goes for good, and another one takes its part over.
        held = []
        host.answer = held.append
        await cluster.admit(1)
        await cluster.activate(1)
        await cluster.until(lambda s: s.queues["p"].num_running == 1)
        await host.stop()
        other = cluster.host(host_id="h1")
        await cluster.until_ended()
        assert {i.host_id for i in (await cluster.status()).instances} == {"h1"}
        assert other.requests[0].attempt_id.endswith("#2")


async def test_a_dead_engine_gives_its_calls_back(make, tmp_path):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        held = []
        host.answer = held.append
        await cluster.admit(0)
        await cluster.until(lambda s: s.queues["p"].num_running == 1)
        host.answer = lambda r: [1, 2]
        host.send(instances=[host.set_status("p-0", ["p"], eng.INSTANCE_STATE_DEAD)])
        await cluster.until(lambda s: s.queues["p"].num_waiting == 1)
        host.send(instances=[host.set_status("p-0", ["p"], eng.INSTANCE_STATE_EMPTY)])
        await cluster.until_ended()
        # The first attempt comes after all: recorded, not used (case B4).
        host.finish(held[0], [9, 9, 9])
        await cluster.until(lambda s: s.counters["duplicates"] == 1)
        assert [load.version for load in host.loads if load.policy == "p"] == [0, 0]


async def test_cancelled_samples_end_and_their_calls_are_aborted(make, tmp_path):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        host.answer = lambda r: None
        ids = await cluster.admit(0, groups=2)
        waiting = await cluster.admit(1, groups=1)
        await cluster.until(lambda s: s.queues["p"].num_running == 2)
        await cluster.rollout.cancel_samples(
            cluster.run_id, [ids[0], waiting[0], "nobody"], term=cluster.term
        )
        await cluster.until(lambda s: s.num_open_samples == 1)
        graph = await cluster.graph(ids[0])
        assert graph.sample.status == common_pb2.SAMPLE_STATUS_CANCELLED
        assert [v.meta.status for v in graph.vertices] == [common_pb2.VERTEX_STATUS_CANCELLED]
        assert (await cluster.samples(1))[waiting[0]].status == common_pb2.SAMPLE_STATUS_CANCELLED
        await cluster.until(lambda _: host.aborts == [f"{ids[0]}/0:0#1"])


STUBBORN = """
import asyncio
from pathlib import Path
async def team(ctx, query):
    while query["n"] == 0:
        try:
            await ctx.call("work", text="again")
        except BaseException:
            await asyncio.sleep(0.005)
    return await ctx.call("plan", text="x")

def reward(sample):
    while not Path(sample.query["go"]).exists():
        __import__("time").sleep(0.01)
    return 1.0
"""


async def test_what_is_cut_has_ended_when_that_is_answered(make, tmp_path):
    """Its group ends next, and what comes after that is late: it would stay open for ever."""
    go = tmp_path / "go"
    async with make(STUBBORN) as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        host.answer = lambda request: [1] if request.policy == "p" else None
        ids = await cluster.admit(0, queries=[{"n": n, "go": str(go)} for n in (0, 1, 2)])
        # One that heeds nothing, one that is being scored, one that waits to be.
        await cluster.until(lambda s: s.counters["vertices"] == 2 and len(host.requests) == 3)
        reward = psutil.Process(await user_code_of(cluster, "reward"))
        await cluster.until(lambda _: reward.status() == psutil.STATUS_SLEEPING)
        await cluster.rollout.cancel_samples(cluster.run_id, ids, term=cluster.term)
        samples = await cluster.samples()
        assert {samples[i].status for i in ids} == {common_pb2.SAMPLE_STATUS_CANCELLED}
        assert (await cluster.status()).num_open_samples == 0
        go.touch()  # a score that comes now is nobody's
        (later,) = await cluster.admit(1, query={"n": 1, "go": str(go)})
        await cluster.activate(1)
        status = await cluster.until_ended()
        assert (await cluster.samples(1))[later].status == DONE
        assert (await cluster.samples())[ids[1]].status == common_pb2.SAMPLE_STATUS_CANCELLED
        assert status.counters["samples_done"] == 1
        # What it still tried in its last moments reached nobody.
        await cluster.until(lambda s: s.queues["q"].num_running + s.queues["q"].num_waiting == 0)


LARGE = """
def make(text):
    return text

async def team(ctx, query):
    said = await ctx.tool("make", text="x" * query["n"])
    return said.text

def reward(sample):
    return 1.0
"""


async def test_the_largest_values_are_stored_and_larger_ones_end_their_sample_alone(make, tmp_path):
    largest = MAX_VALUE_BYTES - len('{"text":""}')
    async with make(LARGE, workflow={"tools": {"make": "team:make"}}) as cluster:
        await opened(cluster, tmp_path)
        ids = await cluster.admit(0, queries=[{"n": largest}, {"n": largest + 1}, {"n": 1}])
        status = await cluster.until_ended()
        assert not status.HasField("fatal"), status.fatal
        samples = await cluster.samples()
        assert [samples[i].status for i in ids] == [DONE, FAILED, DONE]
        assert "arguments of tool 'make'" in samples[ids[1]].failure.message
        assert len(samples[ids[0]].output_json) == largest + 2


async def test_status_names_what_the_run_waits_for_and_its_stream_ends_with_the_service(
    make, tmp_path
):
    async with make() as cluster:
        await cluster.create_run(tmp_path / "data.jsonl")
        await cluster.open()
        status = await cluster.status()
        assert not status.ready
        text = "\n".join(status.waits)
        assert "no version is active" in text
        assert "policy p: no instance serves version 0" in text
        seen = []
        address = cluster.rollout_service.address
        async with RolloutClient.connect(address, patience_s=0.2) as client:
            with pytest.raises(UnavailableError, match="no answer for"):
                async for item in client.watch_status(cluster.run_id, interval_s=0.05):
                    seen.append(item)
                    if len(seen) == 3:
                        cluster.rollout_service.kill()
        assert len(seen) >= 3
