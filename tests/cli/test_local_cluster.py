"""The local cluster, with the real store as its one service."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flexmarl.cli.cluster.attach import find_running, parse_cluster
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.cluster.local import LocalCluster
from flexmarl.cli.cluster.plan import STORE, ClusterSettings
from flexmarl.cli.cluster.purge import purge_folder
from flexmarl.cli.commands.cluster import down
from flexmarl.cli.errors import CliError
from flexmarl.client.store import StoreClient


@pytest.fixture
def folder(tmp_path: Path):
    shm = Path("/dev/shm") / f"flexmarl-test-{os.getpid()}"
    yield ClusterFolder(tmp_path / "cluster")
    shutil.rmtree(shm, ignore_errors=True)


def settings(*overrides: str) -> ClusterSettings:
    shm = f"meg_store.store.shm_dir=/dev/shm/flexmarl-test-{os.getpid()}"
    return ClusterSettings(overrides=(shm, *overrides))


def cluster_of(folder: ClusterFolder, said: list[str], *overrides: str) -> LocalCluster:
    return LocalCluster(folder, settings(*overrides), tell=said.append, names=(STORE,))


async def wait_until(condition, *, what: str) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - other processes change it
            await asyncio.sleep(0.02)
    assert condition(), what


def service(folder: ClusterFolder) -> dict:
    running = find_running(folder)
    assert running is not None
    return running.services[STORE]


async def test_a_killed_service_comes_back_at_its_address(folder):
    said: list[str] = []
    cluster = cluster_of(folder, said)
    await cluster.start()
    try:
        before = service(folder)
        os.kill(before["pid"], signal.SIGKILL)
        async with StoreClient.connect(before["address"]) as store:
            await wait_until(
                lambda: service(folder)["restarts"] == 1 and service(folder)["state"] == "ready",
                what="the store is back",
            )
            assert (await store.get_stats()).shard == "s0"
        after = service(folder)
        assert after["address"] == before["address"]
        assert after["pid"] != before["pid"]
        assert said[0].startswith("meg_store was ended by SIGKILL; starting it again at ")
        assert said[1] == "meg_store: serves again"
    finally:
        await cluster.stop()
    assert not psutil.pid_exists(after["pid"])
    assert find_running(folder) is None


async def test_a_service_that_keeps_dying_ends_the_cluster_with_its_log(folder, monkeypatch):
    from flexmarl.cli.cluster import restarts

    monkeypatch.setattr(restarts, "MAX_RESTARTS", 1)
    cluster = cluster_of(folder, [])
    await cluster.start()
    try:
        failed = asyncio.create_task(cluster.failed())
        for restarted in range(2):
            await wait_until(
                lambda n=restarted: (
                    service(folder)["restarts"] == n and service(folder)["state"] == "ready"
                ),
                what="the store runs",
            )
            os.kill(service(folder)["pid"], signal.SIGKILL)
        with pytest.raises(CliError, match="ended 2 times within 60 s") as caught:
            await asyncio.wait_for(failed, 30)
        assert caught.value.exit_code == 1
        assert "listening" in caught.value.detail
    finally:
        await cluster.stop()


async def test_a_service_that_refuses_to_start_is_quoted(folder):
    cluster = cluster_of(folder, [], "meg_store.store.durabilty=fsync")
    with pytest.raises(CliError, match=r"unknown key 'store\.durabilty'.*did you mean") as caught:
        await cluster.start()
    assert caught.value.exit_code == 2


async def test_services_outlive_who_waits_for_their_failure_and_stop_in_order(folder):
    cluster = cluster_of(folder, [])
    await cluster.start()
    try:
        waiting = asyncio.create_task(cluster.failed())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with StoreClient.connect(cluster.address(STORE)) as store:
            assert (await store.get_stats()).shard == "s0"
        pid = service(folder)["pid"]
    finally:
        await cluster.stop()
    assert not psutil.pid_exists(pid)
    last = json.loads(folder.log(STORE).read_text().splitlines()[-1])
    assert last["event"] == "stopped"


async def test_one_process_per_folder(folder):
    cluster = cluster_of(folder, [])
    await cluster.start()
    try:
        with pytest.raises(CliError, match=f"in use by process {os.getpid()}"):
            await cluster_of(folder, []).start()
        assert find_running(folder) is not None
    finally:
        await cluster.stop()


async def test_ports_are_kept_for_the_next_start(folder):
    addresses = []
    for _ in range(2):
        cluster = cluster_of(folder, [])
        await cluster.start()
        addresses.append(cluster.address(STORE))
        await cluster.stop()
    assert addresses[0] == addresses[1]


async def test_services_die_with_the_process_that_runs_them(folder):
    command = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from flexmarl.cli.cluster.folder import ClusterFolder\n"
        "from flexmarl.cli.cluster.local import LocalCluster\n"
        "from flexmarl.cli.cluster.plan import STORE, ClusterSettings\n"
        "async def main():\n"
        "    settings = ClusterSettings(overrides=(sys.argv[2],))\n"
        "    cluster = LocalCluster(ClusterFolder(Path(sys.argv[1])), settings, tell=print,\n"
        "                           names=(STORE,))\n"
        "    await cluster.start()\n"
        "    print('ready', flush=True)\n"
        "    await cluster.failed()\n"
        "asyncio.run(main())\n"
    )
    supervisor = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", command, str(folder.path), settings().overrides[0]],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert supervisor.stdout is not None
        await asyncio.to_thread(
            lambda: next(line for line in supervisor.stdout if line == "ready\n")
        )
        store = psutil.Process(service(folder)["pid"])
    finally:
        supervisor.kill()
        supervisor.wait()
    await asyncio.to_thread(store.wait, 20)
    # A crash leaves its files; they name nobody who lives, and the next start works.
    assert find_running(folder) is None
    cluster = cluster_of(folder, [])
    await cluster.start()
    await cluster.stop()


async def test_a_purge_frees_disk_and_memory_and_leaves_what_is_not_the_clusters(folder):
    cluster = cluster_of(folder, [])
    await cluster.start()
    shm = Path("/dev/shm") / f"flexmarl-test-{os.getpid()}"
    try:
        with pytest.raises(CliError, match="in use by process"):
            purge_folder(folder)
    finally:
        await cluster.stop()
    # What a run leaves to be resumed.
    shm.mkdir(exist_ok=True)
    (shm / "0123-4567.seg").write_bytes(bytes(1000))
    (shm / "somebody.else").write_bytes(b"x")
    (folder.path / "notes.txt").write_text("mine")
    assert purge_folder(folder) > 1000
    assert [path.name for path in shm.iterdir()] == ["somebody.else"]
    assert [path.name for path in folder.path.iterdir()] == ["notes.txt"]
    with pytest.raises(CliError, match="no cluster was started there"):
        purge_folder(folder)
    assert (folder.path / "notes.txt").exists()


async def test_a_purged_folder_is_gone_and_can_be_used_again(folder):
    cluster = cluster_of(folder, [])
    await cluster.start()
    await cluster.stop()
    await asyncio.to_thread(down, folder.path, purge=True)
    assert not folder.path.exists()
    again = cluster_of(folder, [])
    await again.start()
    await again.stop()


def test_a_foreign_pid_is_no_cluster(folder):
    folder.path.mkdir(parents=True)
    folder.cluster_file.write_text(
        json.dumps({"pid": os.getpid(), "started_s": 1.0, "background": True, "services": {}})
    )
    assert find_running(folder) is None


@pytest.mark.parametrize(
    ("items", "why"),
    [
        (["nowhere"], "no cluster runs there"),
        (["orchestrator=a:1"], "give the folder"),
        (["store=a"], "write the address as HOST:PORT"),
        (["stor=a:1"], "give the folder"),
    ],
)
def test_a_cluster_that_cannot_be_meant(items: list[str], why: str):
    with pytest.raises(CliError, match=why):
        parse_cluster(items)


def test_a_cluster_by_its_addresses():
    found = parse_cluster(["store=h:1", "orchestrator=h:2"])
    assert (found.store, found.orchestrator) == ("h:1", "h:2")
