"""`kill -9` of every kind of process in mid-run (I12): the counts are those of a quiet run.

One cluster serves all runs; each run loses one process once its second version is committed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from integration.cluster_harness import Cluster, Size, eventually, kill, run_cli
from integration.whole_run import assert_whole, num_reports

SIZE = Size()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    cluster = Cluster(folder)
    cluster.up()
    yield cluster
    cluster.down()
    assert cluster.survivors() == []
    assert not folder.exists()


def service(name: str):
    return lambda cluster: cluster.pid(name)


def child(name: str, prefix: str):
    """Pid of a service's child, from the record that the service keeps of them."""

    def find(cluster: Cluster) -> int:
        (record,) = (cluster.folder / "services" / name).rglob("*children*.json")
        children = json.loads(record.read_text())
        return next(int(c["pid"]) for c in children if c["name"].startswith(prefix))

    return find


VICTIMS = {
    "nobody": None,
    "meg-store": service("meg_store"),
    "dispatcher": service("rollout"),
    "engine-host": service("engine_host"),
    "trainer": service("trainer"),
    "orchestrator": service("orchestrator"),
    "workflow-worker": child("rollout", "worker"),
    "engine": child("engine_host", "engine"),
    "trainer-rank": child("trainer", "rank"),
}

AT_ONCE = {
    "store-and-trainer": ("meg-store", "trainer"),
    "orchestrator-and-dispatcher": ("orchestrator", "dispatcher"),
    "store-orchestrator-and-engine-host": ("meg-store", "orchestrator", "engine-host"),
}

PAUSE_S = 20.0
"""Longer than a status stream stays silent before it is opened again."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_run_survives_the_death_of(victim: str, cluster: Cluster, tmp_path: Path):
    find = VICTIMS[victim]

    async def misfortune() -> None:
        if find is not None:
            kill(find(cluster))

    await survive(f"kill-{victim}", misfortune, cluster, tmp_path)


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victims", AT_ONCE)
async def test_a_run_survives_deaths_at_once_of(victims: str, cluster: Cluster, tmp_path: Path):
    async def misfortune() -> None:
        for name in AT_ONCE[victims]:
            kill(VICTIMS[name](cluster))

    await survive(f"kill-{victims}", misfortune, cluster, tmp_path)


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["engine", "meg-store", "trainer-rank"])
async def test_a_run_survives_the_pause_of(victim: str, cluster: Cluster, tmp_path: Path):
    async def misfortune() -> None:
        pid = VICTIMS[victim](cluster)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(PAUSE_S)
        finally:
            os.kill(pid, signal.SIGCONT)

    await survive(f"pause-{victim}", misfortune, cluster, tmp_path)


@pytest.mark.timeout(180)
async def test_why_names_an_engine_that_was_stopped(cluster: Cluster, tmp_path: Path):
    """I8: a run whose engine hangs says so, with its process and what would end it."""
    said: list[str] = []

    async def misfortune() -> None:
        # The only one of its policy: without it the run cannot go on. Where it loads weights, it
        # is named as well, but with another reason: then it is let go, and stopped again.
        while not any("request(s), and none ended" in line for line in said):
            pid = child("engine_host", "engine/merger")(cluster)
            os.kill(pid, signal.SIGSTOP)
            try:
                said.append(await named(pid))
            finally:
                os.kill(pid, signal.SIGCONT)

    async def named(pid: int) -> str:
        def waits() -> list[str]:
            return [wait for wait in why(cluster, tmp_path) if f"engine process {pid}" in wait]

        return (await eventually(waits, what="the engine's name", timeout_s=60))[0]

    # Long enough that its end is far off when the engine is stopped.
    await survive("why", misfortune, cluster, tmp_path, size=Size(versions=12))


def why(cluster: Cluster, out: Path) -> list[str]:
    """What `flexmarl why` says of the run that goes on: each wait with what would end it."""
    (folder,) = out.iterdir()
    done = run_cli("why", folder.name, "--data-dir", str(cluster.folder))
    assert done.returncode == 0, done.stdout + done.stderr
    first, *waits = done.stdout.splitlines()
    assert folder.name in first
    return [what + ends for what, ends in itertools.pairwise(waits) if "ends with:" in ends]


async def survive(
    name: str,
    misfortune: Callable[[], Awaitable[None]],
    cluster: Cluster,
    tmp_path: Path,
    *,
    size: Size = SIZE,
) -> None:
    """A run that something happens to after its second version ends whole."""
    run_id = f"{name}-{uuid.uuid4().hex[:6]}"
    client = cluster.train(run_id, size, tmp_path)
    try:
        await eventually(
            lambda: num_reports(tmp_path / run_id) >= 2, what="version 2", timeout_s=120
        )
        cluster.note_processes()
        await misfortune()
        await eventually(lambda: client.poll() is not None, what="the run's end", timeout_s=150)
        output = client.stdout.read()
        assert client.returncode == 0, output
    finally:
        if client.poll() is None:
            client.kill()
            print(client.communicate()[0])
    cluster.note_processes()
    await assert_whole(cluster.address("meg_store"), run_id, size)
    rows = (tmp_path / run_id / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["version"] for row in rows] == list(range(size.versions))
