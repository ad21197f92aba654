"""`kill -9` of every kind of process in mid-run (I12): the counts are those of a quiet run.

One cluster serves all runs; each run loses one process once its second version is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from integration.cluster_harness import Cluster, Size, eventually, kill, run_cli
from integration.whole_run import TRAINED, assert_evaluated, assert_whole, num_reports

from flexmarl.client.run_store import RunStore

SIZE = Size(versions=10)
"""Of most runs; one that ends before something has happened to it is followed by a longer one."""
EVALUATED = ("team_reward", *(f"reward/{agent}" for agent in TRAINED))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    cluster = Cluster(folder)
    cluster.up()
    yield cluster
    cluster.down()
    assert cluster.outlived() == []
    assert not folder.exists()


def service(name: str):
    return lambda cluster: cluster.pid(name)


def child(name: str, prefix: str):
    """Pid of a service's child, from the record that the service keeps of them."""

    def find(cluster: Cluster) -> int:
        (record,) = (cluster.folder / "services" / name).rglob("*children*.json")
        children = json.loads(record.read_text())
        # The newest: those of the run before may still be on their way out.
        return [int(c["pid"]) for c in children if c["name"].startswith(prefix)][-1]

    return find


VICTIMS = {
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

PAUSED = {
    "store": ("meg-store",),
    "engine-and-rank": ("engine", "trainer-rank"),
}

PAUSE_S = 20.0
"""Longer than a status stream stays silent before it is opened again."""


@pytest.mark.timeout(240)
async def test_a_quiet_run_is_whole_and_evaluated(cluster: Cluster, tmp_path: Path):
    """Every second version, greedily and sampled, on queries that are never trained on."""

    evaluation = {"every": 2, "fraction": 0.06, "samples": 2}
    sets = [
        part for key, value in evaluation.items() for part in ("--set", f"evaluation.{key}={value}")
    ]
    run_id = await survive("quiet", None, cluster, tmp_path, sets=sets, last_is_evaluated=True)
    evaluated = range(0, SIZE.versions + 1, 2)
    await assert_evaluated(cluster.address("meg_store"), run_id, evaluated, samples=1 + 2)
    for row in metrics(tmp_path / run_id):
        names = {f"eval/{kind}/{what}" for kind in ("greedy", "sampled") for what in EVALUATED}
        assert names.isdisjoint(row) if row["version"] % 2 else names <= set(row)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_run_survives_the_death_of(victim: str, cluster: Cluster, tmp_path: Path):
    find = VICTIMS[victim]

    async def misfortune(_: Callable[[], None]) -> None:
        kill(find(cluster))

    await survive(f"kill-{victim}", misfortune, cluster, tmp_path)


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victims", AT_ONCE)
async def test_a_run_survives_deaths_at_once_of(victims: str, cluster: Cluster, tmp_path: Path):
    async def misfortune(_: Callable[[], None]) -> None:
        for name in AT_ONCE[victims]:
            kill(VICTIMS[name](cluster))

    await survive(f"kill-{victims}", misfortune, cluster, tmp_path)


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victims", PAUSED)
async def test_a_run_survives_the_pause_of(victims: str, cluster: Cluster, tmp_path: Path):
    async def misfortune(go_on: Callable[[], None]) -> None:
        pids = [VICTIMS[name](cluster) for name in PAUSED[victims]]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        go_on()
        try:
            await asyncio.sleep(PAUSE_S)
        finally:
            for pid in pids:
                # An instance that came to its policy may have brought the run to its end, and this
                # engine, with its run, to its own.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    await survive(f"pause-{victims}", misfortune, cluster, tmp_path)


@pytest.mark.timeout(300)
async def test_why_names_an_engine_that_was_stopped(cluster: Cluster, tmp_path: Path):
    """I8: a run whose engine hangs says so, with its process and what would end it."""
    said: list[str] = []

    async def misfortune(go_on: Callable[[], None]) -> None:
        # The only one of its policy: without it the run cannot go on. Where it loads weights, it
        # is named as well, but with another reason: then it is let go, and stopped again.
        while not any("request(s), and none ended" in line for line in said):
            pid = child("engine_host", "engine/merger")(cluster)
            os.kill(pid, signal.SIGSTOP)
            go_on()
            try:
                said.append(await named(pid))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def named(pid: int) -> str:
        heard: list[str] = []

        def waits() -> list[str]:
            heard[:] = why(cluster, tmp_path)
            return [wait for wait in heard if f"engine process {pid}" in wait]

        try:
            return (await eventually(waits, what="the engine's name", timeout_s=60))[0]
        except AssertionError as error:
            raise AssertionError(f"{error} ({pid}); it said {heard}") from error

    # Long enough that its end is far off when the engine is stopped; and no second instance comes
    # to the merger, with which the run would reach its end all the same.
    sets = ("--set", "rollout.balance.rule=off")
    await survive("why", misfortune, cluster, tmp_path, size=Size(versions=12), sets=sets)


def why(cluster: Cluster, out: Path) -> list[str]:
    """What `flexmarl why` says of the run that goes on: each wait with what would end it."""
    (folder,) = out.iterdir()
    done = run_cli("why", folder.name, "--data-dir", str(cluster.folder))
    assert done.returncode == 0, done.stdout + done.stderr
    first, *waits = done.stdout.splitlines()
    assert folder.name in first
    return [what + ends for what, ends in itertools.pairwise(waits) if "ends with:" in ends]


class EndedFirst(Exception):
    """A run came to its end before anything happened to it."""


Misfortune = Callable[[Callable[[], None]], Awaitable[None]]
"""What happens to a run while its orchestrator stands still; it is given what ends that."""


async def survive(
    name: str,
    misfortune: Misfortune | None,
    cluster: Cluster,
    tmp_path: Path,
    *,
    size: Size = SIZE,
    sets: Sequence[str] = (),
    last_is_evaluated: bool = False,
) -> str:
    """A run that something happens to after its second version ends whole; returns its id."""
    run_id = f"{name}-{uuid.uuid4().hex[:6]}"
    try:
        await run_through(run_id, misfortune, cluster, tmp_path, size=size, sets=sets)
    except EndedFirst:
        shutil.rmtree(tmp_path / run_id)
        longer = replace(size, versions=2 * size.versions)
        return await survive(name, misfortune, cluster, tmp_path, size=longer, sets=sets)
    await assert_whole(cluster.address("meg_store"), run_id, size)
    versions = list(range(size.versions + last_is_evaluated))
    assert [row["version"] for row in metrics(tmp_path / run_id)] == versions
    return run_id


async def run_through(
    run_id: str,
    misfortune: Misfortune | None,
    cluster: Cluster,
    out: Path,
    *,
    size: Size,
    sets: Sequence[str],
) -> None:
    """Trains to the end, over what happens.

    Raises:
        EndedFirst: The run is over, and nothing has happened to it.
    """
    client = cluster.train(run_id, size, out, *sets)
    try:
        await eventually(lambda: num_reports(out / run_id) >= 2, what="version 2", timeout_s=120)
        if misfortune is not None:
            with contextlib.ExitStack() as held:
                held.enter_context(cluster.held())
                if await newest(cluster, run_id) == size.versions:
                    raise EndedFirst
                cluster.note_processes()
                await misfortune(held.close)
        await eventually(lambda: client.poll() is not None, what="the run's end", timeout_s=150)
        output = client.stdout.read()
        assert client.returncode == 0, output
    finally:
        if client.poll() is None:
            client.kill()
            print(client.communicate()[0])
    cluster.note_processes()


async def newest(cluster: Cluster, run_id: str) -> int:
    """The run's version."""
    async with RunStore.connect(cluster.address("meg_store")) as store:
        manifest = await store.get_manifest(run_id)
        assert manifest is not None, "two versions are reported"
        return manifest.version


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What the run's client has written down, by version."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
