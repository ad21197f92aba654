"""Samples that the Orchestrator cuts: how they end, and when."""

from __future__ import annotations

import psutil
import pytest
from rollout.dispatcher_harness import user_code_of
from rollout.team_kit import opened

from flexmarl.api.common.v1 import common_pb2

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
