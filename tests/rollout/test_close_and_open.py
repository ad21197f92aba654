"""A run is closed while calls are in progress, and opened again at the same dispatcher and host."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
from rollout.dispatcher_harness import Cluster, HostStandIn, Services, seeded_tokens
from rollout.worker_harness import run_config, write_model, write_team

from flexmarl.api.common.v1 import common_pb2
from flexmarl.client.errors import FlexMarlError
from flexmarl.core.errors import ErrorReason

TEAM = """
async def team(ctx, query):
    return await ctx.call("plan", text=query["n"])

def reward(sample):
    return 1.0
"""
AGENTS = {"plan": {"policy": "p", "prompt": "{text}>", "max_tokens": 4, "timeout_s": 60}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def services(tmp_path_factory):
    shared = Services(tmp_path_factory.mktemp("services"))
    yield shared
    shared.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(tmp_path, services):
    """A run with two calls at its host, neither of which is answered."""
    await services.revive()
    config = run_config(
        write_model(tmp_path / "model"), write_team(tmp_path / "package", TEAM), agents=AGENTS
    )
    async with Cluster(services, config) as cluster:
        await cluster.create_run(tmp_path / "data.jsonl")
        host = cluster.host(answer=lambda _: None)
        await cluster.open()
        await cluster.activate(0)
        await cluster.admit(0, groups=2)
        await cluster.until(lambda _: len(host.requests) == 2)
        yield cluster


async def close(cluster: Cluster) -> None:
    await cluster.rollout.close_run(cluster.run_id, term=cluster.term)


async def open_soon(cluster: Cluster) -> None:
    """Opens the run as soon as its host has dialled."""
    async with asyncio.timeout(10):
        while True:
            try:
                await cluster.open()
            except FlexMarlError as error:
                assert error.reason == ErrorReason.NOT_ENOUGH_INSTANCES
                await asyncio.sleep(0.02)
            else:
                return


async def goes_on(cluster: Cluster) -> None:
    """Opens the run again: every call is answered, and the host keeps nothing in the end."""
    host = cluster.hosts[0]
    host.answer = seeded_tokens
    await open_soon(cluster)
    await cluster.activate(0)
    await cluster.start(cluster.specs)
    await cluster.until_ended()
    ended = {s.status for s in (await cluster.samples()).values()}
    assert ended == {common_pb2.SAMPLE_STATUS_DONE}
    await cluster.until(lambda _: host.in_hand == {})


def finish_all(host: HostStandIn) -> None:
    for request in list(host.in_hand.values()):
        host.finish(request, [1, 2])


async def emptied(host: HostStandIn) -> None:
    async with asyncio.timeout(10):
        while host.in_hand:  # noqa: ASYNC110 - the dispatcher tells the host, not us
            await asyncio.sleep(0.02)


async def test_what_ended_before_and_was_not_stored(cluster):
    host = cluster.hosts[0]
    cluster.store_service.kill()
    finish_all(host)
    await cluster.until(lambda s: s.queues["p"].num_running == 0)
    await close(cluster)
    await cluster.store_service.start()
    await goes_on(cluster)


async def test_what_runs_is_ended_with_its_instances(cluster):
    host = cluster.hosts[0]
    await close(cluster)
    await emptied(host)
    await goes_on(cluster)


async def test_what_goes_on_at_a_host_that_was_away(cluster):
    host = cluster.hosts[0]
    await host.stop()
    await close(cluster)
    host.start()
    await emptied(host)
    await goes_on(cluster)


async def test_what_had_ended_at_a_host_that_was_away(cluster):
    host = cluster.hosts[0]
    await host.stop()
    finish_all(host)
    await close(cluster)
    host.start()
    await emptied(host)
    await goes_on(cluster)


async def test_a_host_that_was_away_until_the_run_was_open_again(cluster):
    host = cluster.hosts[0]
    await host.stop()
    await cluster.until(lambda s: any(line.startswith("policy p: ") for line in s.waits))
    finish_all(host)
    await close(cluster)
    other = cluster.host(host_id="h1")
    await open_soon(cluster)
    await cluster.activate(0)
    await cluster.start(cluster.specs)
    host.start()
    await cluster.until_ended()
    await emptied(host)
    await emptied(other)
