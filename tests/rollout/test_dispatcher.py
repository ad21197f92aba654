"""The dispatcher as a process: a run of it, refusals, bounds, status; engines are stood in for."""

from __future__ import annotations

import asyncio

import pytest
from rollout.team_kit import AGENTS, TEAM, opened

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.rollout.v1 import engine_pb2 as eng
from flexmarl.client.errors import FlexMarlError, UnavailableError
from flexmarl.client.rollout import RolloutClient
from flexmarl.core.errors import ErrorReason

DONE = common_pb2.SAMPLE_STATUS_DONE
FAILED = common_pb2.SAMPLE_STATUS_FAILED

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
        await cluster.until(lambda _: len(held) == 1)
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

        def answer(request):
            host.mislabel = mislabel if len(host.requests) == 1 else {}
            return [1, 2]

        host.answer = answer
        ids = await cluster.admit(0)
        status = await cluster.until_ended()
        assert status.counters["retries"] == 1
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
