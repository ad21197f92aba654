"""A dispatcher is killed while a real engine host has calls at a server that counts them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from rollout.dispatcher_harness import Cluster, Service, Services
from rollout.engines.completion_server import CompletionServer
from rollout.worker_harness import run_config, write_model, write_team

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1.graph_pb2 import Manifest, PolicyManifest
from flexmarl.client.buffers import BufferSpec

TEAM = """
async def team(ctx, query):
    first = await ctx.call("quick", text=query["n"])
    return await ctx.gather(*[ctx.call("slow", text=n, after=first) for n in range(3)])

def reward(sample):
    return float(len(sample.calls))
"""
LENGTHS = {"quick": 2, "slow": 400}
AGENTS = {
    name: {"policy": "p", "prompt": "{text}", "max_tokens": length}
    for name, length in LENGTHS.items()
}


async def publish(cluster: Cluster) -> Manifest:
    """Weights that the server takes no notice of."""
    writer = await cluster.store.allocate_segment(
        cluster.run_id, f"{cluster.run_id}.p.v0", [BufferSpec(name="w", dtype="F32", shape=(16,))]
    )
    weights = PolicyManifest(weights=await writer.seal(), weights_hash="sha256:its own")
    return Manifest(version=0, policies={"p": weights})


async def open_and_activate(cluster: Cluster, manifest: Manifest) -> None:
    await cluster.open()
    await cluster.rollout.activate_version(cluster.run_id, manifest, term=cluster.term)


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_no_call_reaches_the_engine_twice_when_the_dispatcher_is_killed(tmp_path):
    server = CompletionServer(own_weights=True)
    server.most_tokens = 10  # the slow ones do not end before all of them run
    external = {"engine": "external", "external": {"url": server.base, "model": "m"}}
    config = run_config(
        write_model(tmp_path / "model", max_context=1024), write_team(tmp_path / "package", TEAM),
        agents=AGENTS, policies={"p": {"kind": "frozen", "rollout": external}},
    )  # fmt: skip
    services, host = Services(tmp_path), Service("flexmarl.rollout", tmp_path / "host")
    try:
        await services.revive()
        host.sets = (
            "role=engine-host", f"data_dir={tmp_path / 'host/data'}",
            f"dispatcher={services.rollout.address}",
        )  # fmt: skip
        async with Cluster(services, config) as cluster:
            await cluster.create_run(tmp_path / "data.jsonl")
            await host.start()
            manifest = await publish(cluster)
            await open_and_activate(cluster, manifest)
            ids = await cluster.admit(0, groups=4, samples=2)
            slow = len(ids) * 3
            await cluster.until(lambda s: s.queues["p"].num_running == slow, timeout_s=60)
            async with asyncio.timeout(30):
                # What a dispatcher has sent may be on its way yet, and dies with it.
                while len(server.running) < slow:  # noqa: ASYNC110 - the server has no events
                    await asyncio.sleep(0.02)
            services.rollout.kill()
            server.most_tokens = LENGTHS["slow"]
            async with asyncio.timeout(30):
                while server.running:  # noqa: ASYNC110 - the host goes on without a dispatcher
                    await asyncio.sleep(0.02)
            await services.rollout.start()
            await open_and_activate(cluster, manifest)
            await cluster.start(cluster.specs)
            status = await cluster.until_ended(timeout_s=60)
            assert status.counters["reattached"] == slow
            samples = await cluster.samples()
            assert {samples[i].status for i in ids} == {common_pb2.SAMPLE_STATUS_DONE}
            asked = Counter(body["seed"] for body in server.bodies)
            assert set(asked.values()) == {1}
            assert len(asked) == len(ids) + slow
    finally:
        host.stop()
        services.stop()
        server.close()
