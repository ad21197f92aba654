"""Samples that the Orchestrator cuts: how they end, and when."""

from __future__ import annotations

import asyncio
import contextlib

import psutil
import pytest
from rollout.dispatcher_harness import Cluster, user_code_of
from rollout.team_kit import opened

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1.meg_store_pb2 import GroupClosure
from flexmarl.client.errors import NotFoundError, UnavailableError
from flexmarl.client.rollout import RolloutClient

DONE = common_pb2.SAMPLE_STATUS_DONE

pytestmark = pytest.mark.asyncio(loop_scope="module")


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


async def close_group(cluster: Cluster, sample_id: str) -> None:
    """As an orchestrator does when it has the answer that its samples are cut."""
    dropped = GroupClosure(
        group_id=sample_id.rpartition("-")[0],
        status=common_pb2.GROUP_STATUS_DROPPED,
        drop_reason=common_pb2.VOID_REASON_GROUP_DROPPED,
    )
    await cluster.store.close_groups(cluster.run_id, [dropped], term=cluster.term)


async def test_a_cut_that_its_dispatcher_did_not_live_to_store_is_made_by_the_next_one(
    make, tmp_path
):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        host.answer = lambda r: [1, 2] if r.policy == "p" else None
        cut, other = await cluster.admit(0, groups=2)
        await cluster.until(lambda _: len(host.requests) == 6)
        cluster.store_service.kill()  # no end is stored while the dispatcher lives
        cutting = asyncio.create_task(
            cluster.rollout.cancel_samples(cluster.run_id, [cut], term=cluster.term)
        )
        async with asyncio.timeout(10):
            while len(host.aborts) < 2:  # noqa: ASYNC110 - it has heard of the cut
                await asyncio.sleep(0.01)
        cluster.rollout_service.kill()
        await cluster.store_service.start()
        await cluster.rollout_service.start()
        assert (await cluster.graph(cut)).sample.status == common_pb2.SAMPLE_STATUS_OPEN
        # What the dispatcher is asked is asked again until it is answered, and then its group ends.
        closing = asyncio.create_task(close_after(cluster, cutting, cut))
        await cluster.rollout.open_run(cluster.run_id, term=cluster.term, shards=cluster.shards)
        await cluster.activate(0)
        await cluster.start([spec for spec in cluster.specs if spec.sample_id == other])
        await closing
        graph = await cluster.graph(cut)
        assert graph.sample.status == common_pb2.SAMPLE_STATUS_CANCELLED
        assert (graph.sample.num_vertices, list(graph.sample.used_policies)) == (1, ["p"])
        # A start of it that comes late begins nothing.
        await cluster.start(cluster.specs)
        assert (await cluster.status()).num_open_samples == 1
        host.answer = lambda r: [1, 2]
        for request in [r for r in host.requests if r.attempt_id.startswith(other)][-2:]:
            host.finish(request, [1, 2])
        await cluster.until_ended()
        assert (await cluster.samples())[other].status == DONE


async def close_after(cluster: Cluster, cutting: asyncio.Task[None], sample_id: str) -> None:
    with contextlib.suppress(NotFoundError):  # a dispatcher that has none of them: none is cut
        await cutting
    await close_group(cluster, sample_id)


async def test_what_is_cut_and_never_began_or_has_ended_stays_as_it_is(make, tmp_path):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        (ended,) = await cluster.admit(0)
        await cluster.until_ended()
        before = (await cluster.samples())[ended]
        (never,) = await cluster.admit(1, start=False)
        cluster.rollout_service.kill()
        await cluster.rollout_service.start()
        await cluster.open()
        names = [ended, never, "b000000a0-g0077-s000a0", "nobody", ""]
        await cluster.rollout.cancel_samples(cluster.run_id, names, term=cluster.term)
        status = await cluster.status()
        assert status.num_open_samples == 0
        assert not status.HasField("fatal"), status.fatal
        assert (await cluster.samples())[ended] == before
        assert await cluster.samples(1) == {}


async def test_a_cut_is_answered_when_its_run_is_open(make, tmp_path):
    async with make() as cluster:
        await cluster.create_run(tmp_path / "data.jsonl")
        async with RolloutClient.connect(cluster.rollout_service.address, patience_s=0) as client:
            with pytest.raises(UnavailableError, match="not open here yet"):
                await client.cancel_samples(cluster.run_id, ["nobody"], term=1)
            await cluster.open()
            await client.cancel_samples(cluster.run_id, ["nobody"], term=cluster.term)
