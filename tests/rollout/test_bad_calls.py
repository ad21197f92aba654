"""Calls of the dispatcher that make no sense: refused where they come in, and nothing else ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import pytest_asyncio
from rollout.dispatcher_harness import Cluster, HostStandIn, Services
from rollout.worker_harness import run_config, write_model, write_team

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1.graph_pb2 import Manifest, PolicyManifest
from flexmarl.api.rollout.v1 import engine_pb2 as eng
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.api.rollout.v1.rollout_pb2_grpc import RolloutServiceStub
from flexmarl.client.channel import connect
from flexmarl.client.errors import FlexMarlError
from flexmarl.core.errors import ErrorReason

TEAM = """
async def team(ctx, query):
    return await ctx.call("echo", text=0)

def reward(sample):
    return 1.0
"""
DONE = common_pb2.SAMPLE_STATUS_DONE
FAILED = common_pb2.SAMPLE_STATUS_FAILED

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(tmp_path_factory):
    """One run for all: whatever is refused, it goes on."""
    folder = tmp_path_factory.mktemp("bad-calls")
    config = run_config(write_model(folder / "model"), write_team(folder / "package", TEAM))
    services = Services(folder, host_grace_s=1.5)
    try:
        await services.revive()
        async with Cluster(services, config) as cluster:
            await cluster.create_run(folder / "data.jsonl")
            cluster.host()
            await cluster.open()
            await cluster.activate(0)
            yield cluster
    finally:
        services.stop()


async def refused(call: Any, *words: str) -> None:
    with pytest.raises(FlexMarlError) as told:
        await call
    assert told.value.reason is ErrorReason.INVALID_ARGUMENT, told.value
    for word in words:
        assert word in str(told.value)


async def goes_on(cluster: Cluster, batch: int) -> None:
    """The run has lost nothing: a sample of it is sampled as ever."""
    (sample_id,) = await cluster.admit(batch)
    status = await cluster.until_ended()
    assert not status.HasField("fatal"), status.fatal
    assert (await cluster.samples(batch))[sample_id].status == DONE


GOOD = SampleSpec(
    sample_id="b000000a0-g0007-s001a0",
    group_id="b000000a0-g0007",
    group_ordinal=7,
    ordinal=1,
    query_json=b"{}",
)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"sample_id": "x"}, "not a sample id: 'x'"),
        ({"sample_id": ""}, "not a sample id"),
        ({"sample_id": "b000000a0-g0007-s001a0/0:0"}, "not a sample id"),
        ({"group_id": "b000000a0-g0008"}, "b000000a0-g0007-s001a0 is not the sample"),
        ({"batch": 1}, "is not the sample"),
        ({"batch_attempt": 1}, "is not the sample"),
        ({"ordinal": 2}, "is not the sample"),
        ({"sample_attempt": 1}, "is not the sample"),
        ({"group_ordinal": 8}, "is not the sample"),
        ({"evaluation": True}, "is not the sample"),
    ],
)
async def test_samples_that_do_not_name_themselves_are_refused_with_all_others(
    cluster, change, word
):
    spec = SampleSpec()
    spec.CopyFrom(GOOD)
    for name, value in change.items():
        setattr(spec, name, value)
    good = SampleSpec(
        sample_id="b000000a0-g0006-s000a0", group_id="b000000a0-g0006", group_ordinal=6
    )
    await refused(cluster.start([good, spec]), word)
    status = await cluster.status()
    assert status.num_open_samples == 0
    assert not status.HasField("fatal")


async def test_weights_that_name_nothing_are_refused(cluster):
    weights = PolicyManifest(weights_hash="h")
    term, run = cluster.term, cluster.run_id
    rollout = cluster.rollout
    for policies, word in (
        ({"other": weights}, "no policy 'other'"),
        ({"p": PolicyManifest()}, "policies.p: weights_hash is empty"),
    ):
        await refused(rollout.prepare_weights(run, 1, policies, term=term), word)
        manifest = Manifest(version=1, policies=policies)
        await refused(rollout.activate_version(run, manifest, term=term), word)
    await refused(
        rollout.activate_version(run, Manifest(version=1), term=term), "no weights of 'p'"
    )
    assert (await cluster.status()).version == 0
    await goes_on(cluster, 0)


async def test_an_estimator_that_the_run_has_not_is_not_asked(cluster):
    call = cluster.rollout.compute_advantages
    for scopes in ([[1.0]], []):
        await refused(
            call(cluster.run_id, "g", scopes, term=cluster.term, timeout_s=10), "own estimator"
        )


async def say(cluster: Cluster, *messages: eng.ConnectEngineHostRequest) -> list[str]:
    """Speaks as a host until it was answered; returns what it is told to forget."""
    forgotten: list[str] = []
    async with connect(cluster.rollout_service.address) as channel:
        call: Any = RolloutServiceStub(channel).ConnectEngineHost(timeout=10)
        for message in messages:
            await call.write(message)
        async with asyncio.timeout(10):
            first = await call.read()
            assert first.HasField("plan")
            forgotten.extend(first.stored)
            while messages[-1].results and not forgotten:
                forgotten.extend((await call.read()).stored)
        call.cancel()
    return forgotten


@pytest.mark.parametrize(
    ("first", "word"),
    [
        (eng.ConnectEngineHostRequest(), "must be a hello"),
        (eng.ConnectEngineHostRequest(hello=eng.HostHello(host_id="../x")), "host_id '../x'"),
        (
            eng.ConnectEngineHostRequest(hello=eng.HostHello(host_id="h9", attempt_ids=["x"])),
            "not an attempt id: 'x'",
        ),
        (
            eng.ConnectEngineHostRequest(hello=eng.HostHello(host_id="h9", attempt_ids=["a#²"])),
            "not an attempt id",
        ),
    ],
)
async def test_hosts_that_cannot_be_read_are_refused(cluster, first, word):
    await refused(say(cluster, first), word)


async def test_results_of_nobody_are_let_go_and_instances_of_nobody_are_ignored(cluster):
    hello = eng.HostHello(
        host_id="h8",
        run_id=cluster.run_id,
        instances=[eng.InstanceStatus(instance_id=name) for name in ("", "p-0", "p-77")],
        attempt_ids=["b000000a0-g0000-s000a0/0:0#1"],
    )
    junk = ["", "x", "x#", "x#y", "b000000a0-g0000-s000a0/0:0#1"]
    forgotten = await say(
        cluster,
        eng.ConnectEngineHostRequest(hello=hello),
        eng.ConnectEngineHostRequest(results=[eng.GenerateResult(attempt_id=a) for a in junk]),
    )
    assert forgotten == junk
    await cluster.activate(1)
    await goes_on(cluster, 1)


async def test_of_two_hosts_of_one_name_the_later_one_stays(cluster):
    """Each would take the other's place for ever, and its requests with it."""
    first = cluster.hosts[0]
    later = HostStandIn(first.address, host_id=first.host_id).start()
    cluster.hosts.append(later)
    await cluster.until(lambda _: later.run_id == cluster.run_id)
    log = cluster.rollout_service.folder / "log.jsonl"
    async with asyncio.timeout(10):
        while "host_name_twice" not in log.read_text():  # noqa: ASYNC110, ASYNC240, RUF100
            await asyncio.sleep(0.02)
    await cluster.activate(2)
    asked = len(first.requests)
    await goes_on(cluster, 2)
    assert len(first.requests) == asked
    assert later.requests
    # Started again it is a new process, and the old one is gone.
    await later.stop()
    again = HostStandIn(first.address, host_id=first.host_id).start()
    cluster.hosts.append(again)
    await cluster.activate(3)
    await goes_on(cluster, 3)
    assert again.requests
