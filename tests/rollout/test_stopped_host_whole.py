"""A real engine host is stopped, longer than it may be away: what it had in hand goes elsewhere."""

from __future__ import annotations

import signal

import pytest
from rollout.dispatcher_harness import Cluster, Service, Services
from rollout.test_reattach_whole import open_and_activate, publish
from rollout.worker_harness import run_config, write_model, write_team

from flexmarl.api.common.v1 import common_pb2

TEAM = """
async def team(ctx, query):
    return await ctx.gather(*[ctx.call("slow", text=n) for n in range(3)])

def reward(sample):
    return float(len(sample.calls))
"""
AGENTS = {"slow": {"policy": "p", "prompt": "{text}>", "max_tokens": 100, "timeout_s": 200}}
ROLLOUT = {
    "engine": "simulated", "instances": 2, "max_concurrency": 8,
    "simulated": {"decode_tokens_per_s": 50},
}  # fmt: skip


@pytest.mark.real
@pytest.mark.timeout(180)
async def test_what_a_stopped_host_had_in_hand_goes_elsewhere(tmp_path):
    """Long before its deadline: the stream of a host that says nothing ends."""
    services = Services(tmp_path, host_grace_s=1)
    config = run_config(
        write_model(tmp_path / "model", max_context=1024), write_team(tmp_path / "package", TEAM),
        agents=AGENTS, policies={"p": {"kind": "frozen", "rollout": ROLLOUT}},
    )  # fmt: skip
    hosts = [Service("flexmarl.rollout", tmp_path / name) for name in ("h0", "h1")]
    try:
        await services.revive()
        async with Cluster(services, config) as cluster:
            await cluster.create_run(tmp_path / "data.jsonl")
            for host in hosts:
                name = host.folder.name
                host.sets = (
                    "role=engine-host", f"data_dir={tmp_path / name / 'data'}", f"host_id={name}",
                    f"dispatcher={services.rollout.address}",
                )  # fmt: skip
                await host.start()
            manifest = await publish(cluster)
            await open_and_activate(cluster, manifest)
            ids = await cluster.admit(0, groups=4)
            await cluster.until(lambda s: len(s.instances) == 2 and all_run(s), timeout_s=60)
            tell(hosts[0], signal.SIGSTOP)
            await cluster.until_ended(timeout_s=90)
            tell(hosts[0], signal.SIGCONT)
            samples = await cluster.samples()
            assert {samples[i].status for i in ids} == {common_pb2.SAMPLE_STATUS_DONE}
            for name in ids:
                graph = await cluster.graph(name)
                assert [v.meta.status for v in graph.vertices] == [
                    common_pb2.VERTEX_STATUS_DONE
                ] * 3
            # It comes back, and nothing of what it made meanwhile counts.
            status = await cluster.until(lambda s: s.counters["vertices"] == 3 * len(ids))
            assert status.counters["samples_done"] == len(ids)
    finally:
        for host in hosts:
            tell(host, signal.SIGCONT)
            host.stop()
        services.stop()


def tell(host: Service, what: signal.Signals) -> None:
    if host.process is not None:
        host.process.send_signal(what)


def all_run(status) -> bool:
    """Whether each of the two instances has something in hand."""
    return all(instance.num_running for instance in status.instances)
