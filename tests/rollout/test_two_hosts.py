"""A dispatcher is killed and started while hosts with little room each come back one by one."""

from __future__ import annotations

import asyncio

import pytest
from rollout.dispatcher_harness import Cluster, Services
from rollout.worker_harness import run_config, write_model, write_team

TEAM = """
async def team(ctx, query):
    return await ctx.call("second", text=await ctx.call("first", text=query["n"]))

def reward(sample):
    return 1.0
"""
AGENTS = {
    name: {"policy": name[0], "prompt": "{text}>", "max_tokens": 4} for name in ("first", "second")
}


@pytest.mark.timeout(90)
async def test_a_run_is_not_refused_for_hosts_that_have_not_dialled_yet(tmp_path):
    services = Services(tmp_path)
    config = run_config(
        write_model(tmp_path / "model"), write_team(tmp_path / "package", TEAM), agents=AGENTS
    )
    try:
        await services.revive()
        async with Cluster(services, config) as cluster:
            await cluster.create_run(tmp_path / "data.jsonl")
            hosts = [cluster.host(host_id=name, room=1) for name in ("a", "b")]
            await cluster.open()
            await cluster.activate(0)
            await cluster.admit(0, groups=2)
            await cluster.until_ended()
            plans = [list(host.specs) for host in hosts]
            await hosts[1].stop()
            services.rollout.kill()
            before = hosts[0].num_streams
            await services.rollout.start()
            opening = asyncio.create_task(cluster.open())
            async with asyncio.timeout(30):
                # The other one dials, and has room for one policy only.
                while hosts[0].num_streams == before:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            hosts[1].start()
            await opening
            await cluster.activate(1)
            await cluster.admit(1, groups=2)
            status = await cluster.until_ended()
            assert status.counters["samples_done"] == 2
            assert [list(host.specs) for host in hosts] == plans
    finally:
        services.stop()
