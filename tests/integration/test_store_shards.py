"""A run over two stores: it trains, waits for a store that is down, and is whole in the end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from integration.cluster_harness import Cluster, Size, eventually, run_cli
from integration.whole_run import assert_whole, num_reports
from meg_store.store_harness import StoreProcess

from flexmarl.api.common.v1 import common_pb2
from flexmarl.client.run_store import RunStore

SIZE = Size(versions=16)
"""Long enough on a fast machine, too, to be held after the second version."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For the runs that need no settings of their own."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    cluster.up()
    yield cluster
    cluster.down()


@pytest.mark.real
@pytest.mark.timeout(300)
async def test_a_run_over_two_stores_survives_the_death_of_one(cluster: Cluster, tmp_path: Path):
    copies: list[dict[str, str]] = []

    async def dies_and_comes_back(run: TwoStores) -> None:
        await run.kill_other()
        await asyncio.sleep(2)
        assert run.client.poll() is None
        await run.other.start()
        async with RunStore.connect(run.cluster.address("meg_store")) as store:
            await store.get_run(run.run_id)
            made = await store.create_snapshots("middle")
        copies.extend({"shard": copy.shard, "path": copy.path} for copy in made)

    async with two_stores(cluster, tmp_path, dies_and_comes_back) as run:
        home = run.cluster.address("meg_store")
        await assert_whole(home, run.run_id, SIZE)
        async with RunStore.connect(home) as store:
            await store.get_run(run.run_id)
            held = {name: len(await c.list_groups(run.run_id)) for name, c in store.shards.items()}
            assert set(held) == {"s0", "s1"}
            assert all(held.values())
            assert sum(held.values()) == SIZE.versions * SIZE.groups
            where = ("--data-dir", str(run.cluster.folder), "--json")
            calls = json.loads(await cli("agents", run.run_id, *where))
            assert sum(agent["calls"] for agent in calls) == SIZE.versions * SIZE.vertices
            listed = json.loads(await cli("vertices", run.run_id, "--limit", "9999", *where))
            assert len(listed) == SIZE.versions * SIZE.vertices
            await assert_stores_agree(copies, tmp_path / "middle")
            ended = json.loads(await cli("store", "snapshot", "--run", run.run_id, *where))
            await assert_stores_agree(ended, tmp_path / "end")
            await cli("runs", "delete", run.run_id, "--data-dir", str(run.cluster.folder))
            left = {r.run_id for s in store.shards.values() for r in await s.list_runs()}
            assert run.run_id not in left


async def assert_stores_agree(copies: list[dict[str, str]], folder: Path) -> None:
    """The snapshots of both stores fit together, and so do the stores that are made of them."""
    assert [copy["shard"] for copy in copies] == ["s0", "s1"]
    paths = [copy["path"] for copy in copies]
    assert "no damage" in await cli("store", "check", *paths)
    folders = {copy["shard"]: str(folder / copy["shard"]) for copy in copies}
    options = [f"--store-dir={name}={path}" for name, path in folders.items()]
    await cli("store", "restore", *paths, *options)
    assert "no damage" in await cli("store", "check", *folders.values())


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_run_goes_on_without_a_store_that_is_given_up(tmp_path):
    async def is_given_up(run: TwoStores) -> None:
        await run.kill_other()
        said = await cli("store", "lost", "s1", "--data-dir", str(run.cluster.folder))
        assert said.startswith(f"{run.run_id}: goes on without store shard s1")

    async with own_cluster(tmp_path) as cluster, two_stores(cluster, tmp_path, is_given_up) as run:
        await _assert_nothing_twice(run.cluster.address("meg_store"), run.run_id)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_store_that_stays_away_is_given_up_by_itself(tmp_path):
    async def stays_away(run: TwoStores) -> None:
        await run.kill_other()

    patience = {"orchestrator__shard_patience_s": 5}
    async with (
        own_cluster(tmp_path, **patience) as cluster,
        two_stores(cluster, tmp_path, stays_away) as run,
    ):
        await _assert_nothing_twice(run.cluster.address("meg_store"), run.run_id)


@pytest.mark.real
@pytest.mark.timeout(300)
async def test_a_run_is_resumed_with_a_store_that_has_moved(cluster: Cluster, tmp_path: Path):
    async def moves(run: TwoStores) -> None:
        await cli("stop", run.run_id, "--data-dir", str(run.cluster.folder))
        await eventually(lambda: run.client.poll() is not None, what="its stop", timeout_s=60)
        run.other.kill()
        moved = f"store_shards={json.dumps([await run.other.move()])}"
        versions = f"versions={num_reports(run.out / run.run_id) + 2}"
        run.client = run.cluster.resume(run.run_id, run.out, "--set", moved, "--set", versions)

    # Far more versions than it gets to: it is stopped before.
    async with two_stores(cluster, tmp_path, moves, size=Size(versions=400)) as run:
        home = run.cluster.address("meg_store")
        await assert_whole(home, run.run_id, Size(versions=num_reports(run.out / run.run_id)))
        async with RunStore.connect(home) as store:
            stored = await store.get_run(run.run_id)
            assert [shard.name for shard in stored.shards] == ["s0", "s1"]
            assert stored.shards[1].address == run.other.address


@dataclass
class TwoStores:
    """A run over the cluster's own store and another one."""

    cluster: Cluster
    other: StoreProcess
    client: subprocess.Popen[str]
    run_id: str
    out: Path

    async def kill_other(self) -> None:
        """`kill -9` of the other store, before the run's last version is committed."""
        with self.cluster.held():
            async with RunStore.connect(self.cluster.address("meg_store")) as store:
                manifest = await store.get_manifest(self.run_id)
            assert manifest.version < SIZE.versions, "the run ended first: make it longer"
            self.other.kill()


@asynccontextmanager
async def own_cluster(tmp_path: Path, **service_settings: object) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path / "cluster")
    cluster.up(**service_settings)
    try:
        yield cluster
    finally:
        cluster.down()


@asynccontextmanager
async def two_stores(
    cluster: Cluster,
    tmp_path: Path,
    misfortune: Callable[[TwoStores], Awaitable[None]],
    *,
    size: Size = SIZE,
) -> AsyncIterator[TwoStores]:
    """A run that something happens to after its second version, once it has ended well."""
    (tmp_path / "s1").mkdir()
    other = StoreProcess(tmp_path / "s1", "store.shard=s1", "store.durability=process")
    run_id = f"two-stores-{uuid.uuid4().hex[:6]}"
    out = tmp_path / "out"
    try:
        shards = f"store_shards={json.dumps([await other.start()])}"
        client = cluster.train(run_id, size, out, "--set", shards)
        run = TwoStores(cluster, other, client, run_id, out)
        try:
            await eventually(
                lambda: num_reports(out / run_id) >= 2, what="version 2", timeout_s=120
            )
            await misfortune(run)
            await eventually(lambda: run.client.poll() is not None, what="its end", timeout_s=150)
            output = run.client.stdout.read()
            assert run.client.returncode == 0, output
        finally:
            if run.client.poll() is None:
                run.client.kill()
                print(run.client.communicate()[0])
        yield run
    finally:
        other.clean()


async def cli(*args: str) -> str:
    done = await asyncio.to_thread(run_cli, *args)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def _assert_nothing_twice(home: str, run_id: str) -> None:
    """Every version is there, every batch adds up, every query of the dataset came in its turn."""
    async with RunStore.connect(home) as store:
        assert (await store.get_run(run_id)).lost_shards == ["s1"]
        assert set(store.shards) == {"s0"}
        manifests = await store.list_manifests(run_id)
        assert [m.version for m in manifests] == list(range(SIZE.versions + 1))
        assert manifests[-1].cursor.position == SIZE.versions * SIZE.groups
        for manifest in manifests[1:]:
            batch = manifest.batch
            for counts in batch.policies.values():
                voided = sum(counts.voided.values())
                assert counts.finished == counts.consumed + voided + counts.untrained
            again = await store.count_vertices(
                run_id, batch=batch.batch, batch_attempt=0, consumed=batch.consumed_micro_batch_ids
            )
            assert not again.open_rows
        lost = [g for g in await store.list_groups(run_id) if g.lost_shard]
        repeated = {
            g.replaces_group_id: g.query_index
            for g in await store.list_groups(run_id)
            if g.repeats_query
        }
        dropped = [g for g in lost if g.status == common_pb2.GROUP_STATUS_DROPPED]
        assert repeated == {g.group_id: g.query_index for g in dropped}
        assert len({g.batch for g in lost}) <= 1
