"""A dispatcher, a store, a host or an engine goes away in the middle of a batch, and comes back."""

from __future__ import annotations

import asyncio
from collections import Counter

import psutil
import pytest
from rollout.team_kit import opened

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.rollout.v1 import engine_pb2 as eng

DONE = common_pb2.SAMPLE_STATUS_DONE

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_killed_dispatcher_is_started_again_and_replays(make, tmp_path):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        host.answer = lambda r: [1, 2] if r.policy == "p" else None
        ids = await cluster.admit(0, groups=2)
        # What a dispatcher has sent may be on its way yet, and dies with it.
        await cluster.until(lambda _: len(host.requests) == 6)
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
        await cluster.until(lambda _: len(host.requests) == 48)
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
        await cluster.until(lambda _: len(held) == 1)
        host.answer = lambda r: [1, 2]
        host.send(instances=[host.set_status("p-0", ["p"], eng.INSTANCE_STATE_DEAD)])
        await cluster.until(lambda s: s.queues["p"].num_waiting == 1)
        host.send(instances=[host.set_status("p-0", ["p"], eng.INSTANCE_STATE_EMPTY)])
        await cluster.until_ended()
        # The first attempt comes after all: recorded, not used (case B4).
        host.finish(held[0], [9, 9, 9])
        await cluster.until(lambda s: s.counters["duplicates"] == 1)
        assert [load.version for load in host.loads if load.policy == "p"] == [0, 0]
