"""The overlays for more of a service, all at once: a run lies on every one of their containers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator

import pytest
from compose.compose_kit import ROOT, Containers
from compose.conftest import Cluster
from integration.cluster_harness import Size, eventually

STORES = ("meg-store", "meg-store-1", "meg-store-2")
HOSTS = ("engine-host", "engine-host-1")
TRAINERS = ("trainer", "trainer-1")
SERVICES = ("rollout", "orchestrator", *STORES, *HOSTS, *TRAINERS)
SIZE = Size(versions=8)

ONE_SLOT = """
services:
  trainer: { environment: { FLEXMARL_TRAINER__SLOTS: '["slot0"]' } }
  trainer-1: { environment: { FLEXMARL_TRAINER__SLOTS: '["slot0"]' } }
"""
"""A policy of two ranks then lies on both trainers, or nowhere."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def cluster(cluster_of: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    one_slot = tmp_path_factory.mktemp("overlay") / "one-slot.yml"
    one_slot.write_text(ONE_SLOT)
    names = ("stores", "engine-hosts", "trainers")
    files = [*(ROOT / f"deploy/compose/{name}.yml" for name in names), one_slot]
    with cluster_of(SERVICES, files) as containers:
        yield containers


async def test_a_run_lies_on_all_stores_hosts_and_trainers(
    cluster: Containers, proves: Callable[[str], None]
) -> None:
    shards = json.dumps([f"{name}:7001" for name in STORES[1:]])
    sets = [part for part in SIZE.overrides() if part != "--set"]
    sets += [f"store_shards={shards}", "policies.sorter.trainer.world_size=2"]
    client = cluster.train("spread", *sets)
    try:
        await cluster.reaches(client, "spread", 2)
        engines = [cluster.metric(name, 9463, "flexmarl_engine_host_engines") for name in HOSTS]
        output, _ = await asyncio.to_thread(client.communicate, timeout=600)
    finally:
        if client.poll() is None:
            client.kill()
            print(client.communicate()[0], cluster.logs(*SERVICES))
    assert client.returncode == 0, output + cluster.logs(*SERVICES)
    assert min(engines) >= 1
    rows = counted(cluster, "spread")
    assert rows == SIZE.versions * SIZE.vertices
    written = [calls(cluster, name, 9461, "MegStoreService/WriteGraph") for name in STORES]
    assert min(written) > 0
    busy = [cluster.metric(n, 9464, "flexmarl_trainer_slot_busy_seconds_total") for n in TRAINERS]
    assert min(busy) > 0
    assert sum(calls(cluster, name, 9464, "TrainerService/LendSlots") for name in TRAINERS) > 0
    proves(
        f"3 stores, 2 engine hosts, 2 trainers of one slot: {SIZE.versions} versions, {rows} rows "
        "finished = consumed, the sorter's two ranks on both trainers, a part of the groups on "
        "each store"
    )


async def test_prometheus_finds_what_overlays_add(
    cluster: Containers, proves: Callable[[str], None]
) -> None:
    if "PROMETHEUS_IMAGE" not in os.environ:
        pytest.skip("PROMETHEUS_IMAGE names no image of Prometheus")
    cluster.run("up", "-d", "--no-deps", "prometheus")
    await eventually(
        lambda: cluster.scraped() == set(SERVICES),
        what="every service to be scraped",
        timeout_s=120,
        every_s=0.5,
    )
    proves(f"Prometheus in a container reads all {len(SERVICES)} of them")


def counted(cluster: Containers, run_id: str) -> int:
    """Rows of a run, each consumed; the command fails where finished is not consumed + void."""
    rows = json.loads(cluster.client("counts", run_id, "--json"))
    for row in rows:
        assert row["balances"]
        assert row["finished"] == row["consumed"]
    return sum(row["consumed"] for row in rows)


def calls(cluster: Containers, name: str, port: int, method: str) -> float:
    """Calls of a method, such as `MegStoreService/WriteGraph`, that a service was asked."""
    package = "meg_store" if method.startswith("MegStore") else "trainer"
    label = f"/flexmarl.api.{package}.v1.{method}"
    names = ("flexmarl_rpc_finished_total", "flexmarl_rpc_in_flight")
    return sum(cluster.metric(name, port, metric, method=label) for metric in names)
