"""What a sample has left is in its row; what is closed takes no further call."""

from __future__ import annotations

import asyncio

import pytest
from rollout.dispatcher_harness import Cluster
from rollout.team_kit import opened

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1.meg_store_pb2 import ClosedSubgraph

DONE = common_pb2.SAMPLE_STATUS_DONE
FAILED = common_pb2.SAMPLE_STATUS_FAILED

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
