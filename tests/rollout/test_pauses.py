"""Processes that stand still for a while, as in a container that is paused, and go on."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from rollout.dispatcher_harness import user_code_of
from rollout.team_kit import opened

from flexmarl.api.common.v1 import common_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEAM = """
async def team(ctx, query):
    return await ctx.call("plan", text=query["n"])

def reward(sample):
    return 1.0
"""
STOPPED_S = 3.5
"""Longer than anything in a worker with this step timeout bears."""


async def test_no_sample_is_blamed_for_a_worker_that_was_stopped(make, tmp_path):
    """It may end, since it stood still for too long; but none of its samples has held it."""
    async with make(TEAM, workflow={"step_timeout_s": 0.5, "num_workers": 1}) as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        host.answer = lambda _: None
        (sample,) = await cluster.admit(0)
        await cluster.until(lambda s: s.queues["p"].num_running == 1)
        worker = await user_code_of(cluster, "worker")
        os.kill(worker, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        os.kill(worker, signal.SIGCONT)
        for request in list(host.in_hand.values()):
            host.finish(request, [1, 2])
        await cluster.until_ended()
        assert (await cluster.samples())[sample].status == common_pb2.SAMPLE_STATUS_DONE


HELD = """
import asyncio, re
from pathlib import Path
async def team(ctx, query):
    flag = Path(query["flag"])
    if not flag.exists():
        flag.touch()
        asyncio.get_running_loop().call_soon(re.match, "(a+)+$", "a" * 64 + "b")
    return await ctx.call("plan", text="x")

def reward(sample):
    return 1.0
"""


async def test_no_sample_is_blamed_where_none_of_the_users_code_stands(make, tmp_path):
    """What is written down of a worker that was stopped, but surely: nobody wins a race."""
    async with make(HELD, workflow={"step_timeout_s": 0.5, "num_workers": 1}) as cluster:
        await opened(cluster, tmp_path)
        (sample,) = await cluster.admit(0, query={"flag": str(tmp_path / "flag")})
        status = await cluster.until_ended()
        assert (await cluster.samples())[sample].status == common_pb2.SAMPLE_STATUS_DONE
        assert status.counters["worker_deaths"] == 1
