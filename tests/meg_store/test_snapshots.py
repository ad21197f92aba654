"""Snapshots are whole, those of several stores fit together, restore makes stores of them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from meg_store.filled import fill
from meg_store.store_harness import (
    RUN,
    a_group,
    a_run,
    a_vertex,
    closure,
    ref,
    ref_on,
    serving,
    three_shards,
)

from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.errors import FlexMarlError, RefusedError
from flexmarl.client.run_store import RunStore
from flexmarl.core.errors import DomainError
from flexmarl.meg_store import write_hold
from flexmarl.meg_store.check.store import check_stores
from flexmarl.meg_store.restore import restore
from flexmarl.meg_store.shard import Shard
from flexmarl.meg_store.snapshots import LIST_NAME
from flexmarl.meg_store.write_hold import WriteHold

SHARDS = ("s0", "s1", "s2")
NUM_GROUPS = 12


async def test_snapshot_while_writing_is_whole_and_restores(tmp_path):
    """Rows acknowledged before the call are in it; the restored store goes on from there."""
    live = tmp_path / "live"
    live.mkdir()
    async with serving(live) as (store, _):
        await fill(store)
        in_memory = await store.allocate_segment(RUN, "m0", [BufferSpec("w", "U8", (4,))])
        in_memory.buffers["w"].data[:] = b"abcd"
        await in_memory.seal()
        before = [v async for v in store.list_vertices(RUN, view=pb.VERTEX_VIEW_FULL)]
        stop, writing = asyncio.Event(), asyncio.Event()
        # Of batch 1: what batch 0 was committed with counts its rows.
        group_id = "b000001a0-g0001"
        sample_id = f"{group_id}-s000a0"

        async def write() -> None:
            call = 0
            await store.write_graph(RUN, term=1, groups=[a_group(1, group_id=group_id, batch=1)])
            while not stop.is_set():
                row = a_vertex(
                    call,
                    vertex_id=f"{sample_id}/0:{call}",
                    sample_id=sample_id,
                    group_id=group_id,
                    batch=1,
                )
                await store.write_graph(RUN, term=1, vertices=[row])
                writing.set()
                call += 1

        writer = asyncio.create_task(write())
        async with asyncio.timeout(50):
            await writing.wait()
        made = await store.create_snapshot("first")
        stop.set()
        await writer
        assert (made.num_objects, made.num_segments) == (2, 3)
        with pytest.raises(FlexMarlError, match="first"):
            await store.create_snapshot("first")
        with pytest.raises(FlexMarlError, match="snapshot"):
            await store.create_snapshot("../first")
    snapshot = Path(made.path)
    assert check_stores([snapshot]).findings == []
    restored = tmp_path / "restored"
    restore([snapshot], [str(restored)])
    with pytest.raises(DomainError, match="ALREADY_EXISTS"):
        restore([snapshot], [str(restored)])
    assert check_stores([restored]).findings == []
    async with serving(restored) as (store, _):
        found = {
            v.meta.vertex_id: v async for v in store.list_vertices(RUN, view=pb.VERTEX_VIEW_FULL)
        }
        assert all(found[v.meta.vertex_id] == v for v in before)
        for key, content in (("m0", b"abcd"), ("w1", b"\x02" * 1000)):
            async with store.open_segment(RUN, key, holder="x") as reader:
                assert str(restored) in str(reader.path)
                assert bytes(reader.buffers["w"].data) == content
        assert await store.acquire_term(RUN, "orchestrator", holder="next") == 2
        assert list(await store.get_vertices(RUN, [ref(a_vertex(0))]))


async def test_a_segment_that_is_being_sealed_is_no_obstacle(tmp_path):
    async with serving(tmp_path) as (store, shard):
        await store.create_run(a_run())
        writer = await store.allocate_segment(RUN, "w", [BufferSpec("w", "U8", (4,))])
        go_on, write = threading.Event(), shard.database.backend.write

        def slowly(batches) -> None:
            assert go_on.wait(timeout=50)
            write(batches)

        shard.database.backend.write = slowly
        try:
            sealing = asyncio.create_task(writer.seal())
            while not shard.segments.sealed():  # noqa: ASYNC110 - until it is decided
                await asyncio.sleep(0.005)
            made = await store.create_snapshot("now")
        finally:
            go_on.set()
        await sealing
        assert made.num_segments == 0
    assert check_stores([Path(made.path)]).findings == []


def test_restore_of_half_a_snapshot_is_refused(tmp_path):
    (tmp_path / "half").mkdir()
    with pytest.raises(DomainError, match="not a whole snapshot"):
        restore([tmp_path / "half"], [str(tmp_path / "restored")])
    assert not (tmp_path / "restored").exists()


class TestHold:
    async def test_mutations_wait_and_reads_do_not(self, store, term, monkeypatch):
        monkeypatch.setattr(write_hold, "MAX_HOLD_S", 60.0)
        async with store.holding_writes("hold"):
            writing = asyncio.create_task(store.write_graph(RUN, term=term, groups=[a_group()]))
            await asyncio.sleep(0.05)
            assert not writing.done()
            assert await store.list_groups(RUN) == []
            with pytest.raises(RefusedError, match="another snapshot"):
                async with store.holding_writes("other"):
                    pass
        await writing
        assert len(await store.list_groups(RUN)) == 1

    async def test_it_ends_by_itself_with_whoever_forgot_it(self, monkeypatch):
        monkeypatch.setattr(write_hold, "MAX_HOLD_S", 0.05)
        hold = WriteHold(max_waiting_bytes=10)
        hold.begin("forgotten")
        await hold.passed(10)
        assert not hold.is_held
        assert not hold.end("forgotten")

    async def test_what_waits_is_bounded(self):
        hold = WriteHold(max_waiting_bytes=10)
        hold.begin("hold")
        first = asyncio.create_task(hold.passed(8))
        await asyncio.sleep(0)
        with pytest.raises(DomainError, match="QUEUE_FULL"):
            await hold.passed(3)
        assert not hold.end("another")
        assert hold.end("hold")
        await first
        await hold.passed(99)


async def start(store: RunStore) -> tuple[int, graph.MicroBatch]:
    """Released rows on all shards, and the record that will take them."""
    term = await store.acquire_term(RUN, "orchestrator", holder="test")
    rows = [a_vertex(group=number) for number in range(NUM_GROUPS)]
    groups = [a_group(number) for number in range(NUM_GROUPS)]
    await store.write_graph(RUN, term=term, groups=groups, vertices=rows)
    ends = [closure(row, group=number) for number, row in enumerate(rows)]
    for end, row in zip(ends, rows, strict=True):
        end.released[0].row.CopyFrom(ref_on(store, row))
    await store.close_groups(RUN, ends, term=term)
    refs = [ref_on(store, row) for row in rows]
    name = "b000000a0-m0000-p"
    return term, graph.MicroBatch(micro_batch_id=name, policy="p", rows=refs, term=term)


@asynccontextmanager
async def slow_copy(shard: Shard) -> AsyncIterator[asyncio.Event]:
    """For the block, a shard's tables are not copied; the event says that somebody wants to."""
    backend = shard.database.backend
    copy, loop = backend.checkpoint, asyncio.get_running_loop()
    go_on, asked = threading.Event(), asyncio.Event()

    def slowly(path: Path) -> None:
        loop.call_soon_threadsafe(asked.set)
        assert go_on.wait(timeout=50)
        copy(path)

    backend.checkpoint = slowly
    try:
        yield asked
    finally:
        go_on.set()


async def test_stores_are_copied_as_they_were_at_one_moment(tmp_path, monkeypatch):
    """A mark that follows its record is in no copy that the record is not in."""
    monkeypatch.setattr(write_hold, "MAX_HOLD_S", 60.0)
    live = tmp_path / "live"
    live.mkdir()
    async with three_shards(live) as (store, shards):
        term, record = await start(store)
        async with slow_copy(shards[1]) as asked:
            copying = asyncio.create_task(store.create_snapshots("first"))
            await asked.wait()
            while shards[0].database.hold.is_held:  # noqa: ASYNC110 - until its tables are copied
                await asyncio.sleep(0.005)
            await store.create_micro_batch(RUN, record)
            marking = asyncio.create_task(
                store.mark_rows(RUN, record.micro_batch_id, record.rows, term=term)
            )
            await asyncio.sleep(0.1)
            assert not marking.done()
        made = await copying
        await marking
        assert [each.shard for each in made] == list(SHARDS)
        snapshots = [Path(each.path) for each in made]
    assert check_stores(snapshots).findings == []
    assert check_stores([live / name for name in SHARDS]).findings == []
    # Without the record, whose copy is older, the marks would be damage: here nothing is marked.
    assert check_stores(snapshots).checked["marks"] == 0

    restored = tmp_path / "restored"
    folders = [f"{name}={restored / name}" for name in reversed(SHARDS)]
    assert [each.listed.shard for each in restore(snapshots, folders)] == list(SHARDS)
    assert check_stores([restored / name for name in SHARDS]).findings == []
    async with three_shards(restored) as (store, _):
        assert await store.acquire_term(RUN, "orchestrator", holder="next") == term + 1
        record.term = term + 1
        assert len((await store.list_claimable(RUN, "p")).rows) == NUM_GROUPS
        await store.create_micro_batch(RUN, record)
        await store.mark_rows(RUN, record.micro_batch_id, record.rows, term=record.term)
        assert not (await store.list_claimable(RUN, "p")).rows


async def test_copies_that_took_too_long_are_refused_and_writes_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(write_hold, "MAX_HOLD_S", 60.0)
    async with three_shards(tmp_path) as (store, shards):
        term, record = await start(store)
        async with slow_copy(shards[2]) as asked:
            copying = asyncio.create_task(store.create_snapshots("late"))
            await asked.wait()
            hold = shards[2].database.hold
            assert hold.end(hold._hold_id)  # as its timer does
            await store.create_micro_batch(RUN, record)
            await store.mark_rows(RUN, record.micro_batch_id, record.rows, term=term)
        with pytest.raises(RefusedError, match=r"store shard 's2'.*make it again"):
            await copying
        assert not (tmp_path / "s2" / "snapshots" / "late").exists()
        assert len(await store.create_snapshots("again")) == len(SHARDS)


class TestRestoreOfSeveral:
    @pytest.fixture
    def listed(self, tmp_path):
        """Makes folders that look like snapshots: what is refused here is never copied."""

        def make(shard: str, **changes: object) -> Path:
            folder = tmp_path / f"{shard}-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            values = {
                "format": 1,
                "shard": shard,
                "request_id": "",
                "created_unix_ns": 1,
                "objects": {},
                "segments": {},
                "segment_bytes": 0,
                "hold_id": "one",
            }
            (folder / LIST_NAME).write_text(json.dumps({**values, **changes}))
            return folder

        return make

    @pytest.mark.parametrize(
        ("folders", "said"),
        [
            (["s0=a"], "store shard 's1': give its folder, s1=FOLDER"),
            (["s0=a", "s1=b", "s2=c"], "no snapshot is of store shard 's2'"),
            (["a", "b"], "SHARD=a"),
            (["s0=a", "s1=a"], "given for store shards 's0' and 's1'"),
            ([], "store shard 's0': give its folder"),
        ],
    )
    def test_folders_must_fit(self, listed, folders, said):
        with pytest.raises(DomainError, match=said):
            restore([listed("s0"), listed("s1")], folders)

    def test_those_that_were_not_made_together_are_refused(self, listed, tmp_path):
        for hold in ("two", ""):
            snapshots = [listed("s0"), listed("s1", hold_id=hold)]
            with pytest.raises(DomainError, match="not made together"):
                restore(snapshots, [f"s0={tmp_path}/a", f"s1={tmp_path}/b"])
        with pytest.raises(DomainError, match="both of store shard 's0'"):
            restore([listed("s0"), listed("s0")], [f"s0={tmp_path}/a"])

    def test_a_store_in_the_way_leaves_all_folders_as_they_are(self, listed, tmp_path):
        (tmp_path / "b" / "db").mkdir(parents=True)
        with pytest.raises(DomainError, match="name another folder for store shard 's1'"):
            restore([listed("s0"), listed("s1")], [f"s0={tmp_path}/a", f"s1={tmp_path}/b"])
        assert not (tmp_path / "a").exists()

    @pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 2}'])
    def test_a_list_that_is_none_is_refused(self, tmp_path, text):
        (tmp_path / LIST_NAME).write_text(text)
        with pytest.raises(DomainError, match="is not the list of a snapshot"):
            restore([tmp_path], [str(tmp_path / "out")])
