"""The cluster of docker-compose.yml, for real: built, trained on, hurt everywhere, trained again.

Needs a container engine and compose. `make test-compose` fails without them; elsewhere this is
skipped. BASE and PIP_ARGS say what images are built from, as for every build; PROMETHEUS_IMAGE
which Prometheus scrapes them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from compose.compose_kit import Containers
from compose.conftest import Cluster
from integration.cluster_harness import Size, eventually
from integration.whole_run import assert_whole

SERVICES = ("meg-store", "rollout", "engine-host", "trainer", "orchestrator")
VERSIONS = int(os.environ.get("FLEXMARL_COMPOSE_VERSIONS", "200"))
"""Two a second on a fast machine, where a container needs some seconds to come back."""
QUICKSTART = Size(versions=VERSIONS, groups=32, samples=8)
CUT_S = 10.0
LEARNT = 0.9
"""The quickstart's reward, mean of its last five versions; at first it is below 0.3."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def cluster(cluster_of: Cluster) -> Iterator[Containers]:
    with cluster_of(SERVICES) as containers:
        yield containers


async def test_a_run_survives_the_death_of_every_container_and_a_cut_network(
    cluster: Containers, proves: Callable[[str], None]
):
    run_id = "hurt"
    client = cluster.train(run_id, f"versions={VERSIONS}")
    try:
        for number, victim in enumerate(SERVICES, 1):
            await cluster.reaches(client, run_id, number + 1)
            cluster.kill(victim)
            await eventually(
                lambda v=victim: cluster.restarts(v) == 1 and cluster.health(v) == "healthy",
                what=f"{victim} to come back",
                timeout_s=180,
                every_s=0.5,
            )
        await cluster.reaches(client, run_id, len(SERVICES) + 2)
        with cluster.cut("trainer"):
            await asyncio.sleep(CUT_S)
        output, _ = await asyncio.to_thread(client.communicate, timeout=1500)
    finally:
        if client.poll() is None:
            client.kill()
            print(client.communicate()[0], cluster.logs(*SERVICES))
    assert client.returncode == 0, output + cluster.logs(*SERVICES)
    await assert_whole(f"{cluster.address('meg-store')}:7001", run_id, QUICKSTART)
    rewards = [json.loads(line)["team_reward"] for line in metrics(cluster, run_id)]
    assert len(rewards) == VERSIONS
    assert rewards[0] < 0.3
    if VERSIONS >= 60:
        assert sum(rewards[-5:]) / 5 > LEARNT
    for policy in ("splitter", "sorter", "merger"):
        assert (cluster.runs / run_id / "policies" / policy / "model.safetensors").is_file()
    reward = sum(rewards[-5:]) / len(rewards[-5:])
    proves(
        f"{len(SERVICES)} containers killed ({', '.join(SERVICES)}), the trainer's cut off for "
        f"{CUT_S:.0f} s: {VERSIONS} versions, {VERSIONS * QUICKSTART.vertices} rows finished = "
        f"consumed, none twice, team reward {rewards[0]:.2f} -> {reward:.2f}"
    )


async def test_another_run_starts_clean(cluster: Containers, proves: Callable[[str], None]):
    size = Size()
    sets = [part for part in size.overrides() if part != "--set"]
    client = cluster.train("clean", *sets)
    output, _ = await asyncio.to_thread(client.communicate, timeout=300)
    assert client.returncode == 0, output + cluster.logs(*SERVICES)
    await assert_whole(f"{cluster.address('meg-store')}:7001", "clean", size)
    proves(
        f"another run after it: {size.versions} versions, {size.vertices} rows each, all consumed"
    )


async def test_prometheus_reaches_every_service(cluster: Containers, proves: Callable[[str], None]):
    if "PROMETHEUS_IMAGE" not in os.environ:
        pytest.skip("PROMETHEUS_IMAGE names no image of Prometheus")
    cluster.run("up", "-d", "--no-deps", "prometheus")
    await eventually(
        lambda: cluster.scraped() == set(SERVICES),
        what="every service to be scraped",
        timeout_s=120,
        every_s=0.5,
    )
    proves(f"Prometheus in a container reads {', '.join(sorted(SERVICES))}")


def metrics(cluster: Containers, run_id: str) -> list[str]:
    return Path(cluster.runs / run_id / "metrics.jsonl").read_text().splitlines()
