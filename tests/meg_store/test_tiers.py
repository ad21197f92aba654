"""Tiers of state segments: room in memory, copies on disk, copies from other stores; pins."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest
from meg_store.store_harness import RUN, a_run, serving

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import Buffer, BufferSpec
from flexmarl.client.errors import ExistsError, FlexMarlError, NotFoundError, UnavailableError
from flexmarl.client.segments import hash_file
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store import pins, segment_files, segments
from flexmarl.meg_store.disk_room import DiskRoom
from flexmarl.meg_store.segment_files import copy_file
from flexmarl.meg_store.segment_record import FETCHED_FROM

SIZE = 640


def buffer(fill: int, *, size: int = SIZE) -> Buffer:
    return Buffer(BufferSpec("w", "U8", (size,)), memoryview(bytes([fill]) * size))


async def put(store, shard, key: str, fill: int) -> common.ObjectRef:
    ref = await store.set(RUN, key, [buffer(fill)])
    await shard.wait_checksum(key)
    return ref


async def read(store, key: str) -> tuple[int, int]:
    """First byte of a segment, and the tier it was read from."""
    async with store.get(RUN, key) as reader:
        return reader.buffers["w"].data[0], reader.view.tier


async def save(store, version: int, weights: common.ObjectRef, **more) -> None:
    term = await store.acquire_term(RUN, "policy/p", holder="test")
    await store.save_state(
        RUN, graph.StateRecord(policy="p", version=version, term=term, weights=weights, **more)
    )


async def commit(store, term: int, version: int, made: common.ObjectRef | graph.StateRecord):
    weights = made.weights if isinstance(made, graph.StateRecord) else made
    policy = graph.PolicyManifest(weights=weights, state_version=version)
    manifest = graph.Manifest(version=version, term=term, policies={"p": policy})
    expected = version - 1 if version else None
    await store.commit(RUN, manifest, expected_version=expected)


async def until(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within 20 s")


class TestSetAndGet:
    async def test_buffers_come_back_by_key(self, store):
        spec = BufferSpec("b", "F32", (2, 2))
        other = Buffer(spec, memoryview(bytes(range(16))))
        ref = await store.set(RUN, "k", [buffer(3), other], attributes={"kind": "test"})
        async with store.get(RUN, "k") as reader:
            assert bytes(reader.buffers["b"].data) == bytes(range(16))
            assert reader.buffers["b"].shape == (2, 2)
            assert (reader.object.key, reader.attributes["kind"]) == (ref.key, "test")
        with pytest.raises(ExistsError, match="CONTENT_MISMATCH"):
            await store.set(RUN, "k", [buffer(4)])


class TestRoomInMemory:
    async def test_least_recently_used_goes_to_disk(self, tmp_path):
        async with serving(tmp_path, memory_tier_bytes=2 * SIZE) as (store, shard):
            await store.create_run(a_run())
            await put(store, shard, "a", 1)
            await put(store, shard, "b", 2)
            await read(store, "a")
            await put(store, shard, "c", 3)
            assert await read(store, "b") == (2, pb.SEGMENT_TIER_DISK)
            assert await read(store, "a") == (1, pb.SEGMENT_TIER_MEMORY)
            assert await read(store, "c") == (3, pb.SEGMENT_TIER_MEMORY)
            numbers = (await store.get_stats()).numbers
            assert numbers["segments_spilled"] == 1
            assert numbers["memory_tier_bytes"] + numbers["pool_bytes"] <= 2 * SIZE
        async with serving(tmp_path) as (store, shard):
            assert await read(store, "b") == (2, pb.SEGMENT_TIER_DISK)

    async def test_segment_in_use_stays_and_the_new_one_says_where_it_lies(self, tmp_path):
        async with serving(tmp_path, memory_tier_bytes=SIZE) as (store, shard):
            await store.create_run(a_run())
            await put(store, shard, "a", 1)
            async with store.get(RUN, "a"):
                writer = await store.allocate_segment(RUN, "b", [BufferSpec("w", "U8", (SIZE,))])
                assert writer.tier == pb.SEGMENT_TIER_DISK
            assert await read(store, "a") == (1, pb.SEGMENT_TIER_MEMORY)

    async def test_full_disk_keeps_what_is_in_memory(self, tmp_path, monkeypatch):
        async with serving(tmp_path, memory_tier_bytes=SIZE) as (store, shard):
            await store.create_run(a_run())
            await put(store, shard, "a", 1)

            async def no_room(*_args):
                return None

            monkeypatch.setattr(shard.files, "_make_fresh", no_room)
            with pytest.raises(FlexMarlError, match="DISK_FULL"):
                await store.set(RUN, "b", [buffer(2)])
            assert await read(store, "a") == (1, pb.SEGMENT_TIER_MEMORY)

    async def test_no_file_takes_what_is_kept_free_on_disk(self, tmp_path, monkeypatch):
        async with serving(tmp_path) as (store, shard):
            await store.create_run(a_run())
            free_bytes = shard.config.min_free_bytes + SIZE - 1
            monkeypatch.setattr(DiskRoom, "free_bytes", free_bytes)
            with pytest.raises(FlexMarlError, match="DISK_FULL"):
                await store.set(RUN, "a", [buffer(1)], tier=pb.SEGMENT_TIER_DISK)
            assert not list((tmp_path / "segments").iterdir())
            await put(store, shard, "b", 1)
            with pytest.raises(FlexMarlError, match="DISK_FULL"):
                await store.create_snapshot("first")
            assert not list((tmp_path / "snapshots").iterdir())
            monkeypatch.undo()
            assert (await store.create_snapshot("first")).num_segments == 1

    async def test_freed_pages_are_written_again(self, tmp_path):
        async with serving(tmp_path) as (store, shard):
            await store.create_run(a_run())
            await put(store, shard, "a", 1)
            assert (
                await shard.segments.sweep(orphan_ttl_s=-1, lease_max_s=60, now=time.monotonic())
                == 1
            )
            writer = await store.allocate_segment(RUN, "b", [BufferSpec("w", "U8", (SIZE,))])
            assert writer.reused

    async def test_a_removed_file_has_no_pages_where_it_is_still_mapped(self, tmp_path):
        async with serving(tmp_path, memory_tier_bytes=2 * SIZE) as (store, shard):
            await store.create_run(a_run())
            await put(store, shard, "a", 1)
            async with store.get(RUN, "a") as reader:
                handle = os.open(reader.path, os.O_RDONLY)
            assert os.fstat(handle).st_blocks > 0
            await shard.segments.sweep(orphan_ttl_s=-1, lease_max_s=60, now=time.monotonic())
            assert os.fstat(handle).st_blocks > 0  # waits to be written again
            await store.allocate_segment(RUN, "b", [BufferSpec("w", "U8", (2 * SIZE,))])
            assert (os.fstat(handle).st_nlink, os.fstat(handle).st_blocks) == (0, 0)
            os.close(handle)

    async def test_a_file_is_not_emptied_while_its_checksum_is_computed(
        self, tmp_path, monkeypatch
    ):
        begun, goes_on = threading.Event(), threading.Event()

        def slow_hash(path, buffers):
            begun.set()
            assert goes_on.wait(20)
            return hash_file(path, buffers)

        monkeypatch.setattr(segments, "hash_file", slow_hash)
        async with serving(tmp_path, reuse_pool_bytes=0) as (store, shard):
            await store.create_run(a_run())
            await store.set(RUN, "a", [buffer(1)])
            await asyncio.to_thread(begun.wait, 20)
            path = shard.segments.find("a").file.path
            await store.delete_run(RUN)
            assert path.stat().st_size == SIZE
            goes_on.set()
            await until(lambda: not path.exists())

    async def test_a_file_that_is_removed_while_it_is_read_keeps_its_content(self, tmp_path):
        async with serving(tmp_path) as (store, shard):
            await store.create_run(a_run())
            await put(store, shard, "a", 1)
            async with store.get(RUN, "a") as reader:
                await store.delete_run(RUN)
                assert bytes(reader.buffers["w"].data) == bytes(buffer(1).data)


async def test_a_file_whose_maker_is_cancelled_leaves_nothing(tmp_path, monkeypatch):
    """Reserving gigabytes takes seconds, in which a caller may hang up."""
    begun, may_end = threading.Event(), threading.Event()
    reserve = segment_files._reserve

    def slow(path: Path, size_bytes: int) -> None:
        begun.set()
        assert may_end.wait(30)
        reserve(path, size_bytes)

    monkeypatch.setattr(segment_files, "_reserve", slow)
    async with serving(tmp_path) as (store, shard):
        await store.create_run(a_run())
        files = shard.segments._files
        before = dict(files.used_bytes)
        making = asyncio.create_task(files.make_in_memory("k", SIZE))
        await asyncio.to_thread(begun.wait, 30)
        making.cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert files.used_bytes == before
        assert list(files.folders[pb.SEGMENT_TIER_MEMORY].glob("*.seg")) == []


class TestCopiesOnDisk:
    async def test_committed_state_survives_the_loss_of_memory(self, tmp_path):
        async with serving(tmp_path, state_to_disk_every=2) as (store, shard):
            await store.create_run(a_run())
            term = await store.acquire_term(RUN, "orchestrator", holder="test")
            nothing = await store.find_whole_versions(RUN)
            assert not nothing.HasField("newest_whole")
            for version in range(4):
                await commit(store, term, version, await put(store, shard, f"w{version}", version))
                if version % 2 == 0:
                    await until(lambda v=version: shard.segments.is_on_disk([f"w{v}"]))
            found = await store.find_whole_versions(RUN)
            assert (found.newest_whole, found.newest_on_disk) == (3, 2)
            assert await read(store, "w2") == (2, pb.SEGMENT_TIER_MEMORY)
        # Another memory folder: the host was started anew.
        async with serving(tmp_path) as (store, shard):
            found = await store.find_whole_versions(RUN)
            assert (found.newest_whole, found.newest_on_disk) == (2, 2)
            assert await read(store, "w2") == (2, pb.SEGMENT_TIER_DISK)
            with pytest.raises(NotFoundError, match="SEGMENT_NOT_FOUND"):
                await read(store, "w3")

    async def test_a_file_that_somebody_removed_from_memory_is_read_from_disk(self, tmp_path):
        async with serving(tmp_path, state_to_disk_every=1) as (store, shard):
            await store.create_run(a_run())
            term = await store.acquire_term(RUN, "orchestrator", holder="test")
            await commit(store, term, 0, await put(store, shard, "w0", 0))
            await until(lambda: shard.segments.is_on_disk(["w0"]))
            in_use = shard.segments._files.used_bytes[pb.SEGMENT_TIER_MEMORY]
            async with store.open_segment(RUN, "w0", holder="test") as reader:
                path, copy = Path(reader.path), Path(reader.view.disk_path)
                path.unlink()  # noqa: ASYNC240
                for _ in range(2):
                    assert await read(store, "w0") == (0, pb.SEGMENT_TIER_DISK)
                assert bytes(reader.buffers["w"].data) == bytes(buffer(0).data)
            assert shard.segments._files.used_bytes[pb.SEGMENT_TIER_MEMORY] < in_use
            copy.unlink()  # noqa: ASYNC240
            with pytest.raises(NotFoundError, match=f"segment w0: its file {copy} is gone"):
                await read(store, "w0")

    async def test_versions_that_fell_behind_are_skipped(self, tmp_path):
        async with serving(tmp_path, state_to_disk_every=1) as (store, shard):
            await store.create_run(a_run())
            term = await store.acquire_term(RUN, "orchestrator", holder="test")
            for version in range(6):
                await commit(store, term, version, await put(store, shard, f"w{version}", version))
            await until(lambda: shard.segments.is_on_disk(["w5"]))
            assert len(shard._copies._due) == 0

    async def test_retention_waits_for_the_copy(self, tmp_path):
        async with serving(tmp_path, state_to_disk_every=3, retain_versions=1) as (store, shard):
            await store.create_run(a_run())
            term = await store.acquire_term(RUN, "orchestrator", holder="test")
            await commit(store, term, 0, await put(store, shard, "w0", 0))
            await until(lambda: shard.segments.is_on_disk(["w0"]))
            for version in (1, 2):
                await commit(store, term, version, await put(store, shard, f"w{version}", version))
            assert shard.segments.are_known(["w0", "w1", "w2"])
            await commit(store, term, 3, await put(store, shard, "w3", 3))
            await until(lambda: shard.segments.is_on_disk(["w3"]))
            await commit(store, term, 4, await put(store, shard, "w4", 4))
            assert not any(shard.segments.are_known([key]) for key in ("w0", "w1", "w2"))
            assert shard.segments.are_known(["w3", "w4"])
            await store.get_stats()
            disk = list((tmp_path / "segments").glob("*.seg"))
            assert len(disk) == 1


class TestReturn:
    async def test_lost_memory_returns_a_run_to_what_is_on_disk(self, tmp_path):
        folder = tmp_path / "one"
        async with serving(folder, state_to_disk_every=1) as (store, shard):
            await store.create_run(a_run())
            term = await store.acquire_term(RUN, "orchestrator", holder="test")
            for version in range(2):
                await save(store, version, await put(store, shard, f"w{version}", version))
                await commit(store, term, version, await store.get_state(RUN, "p"))
                await until(lambda v=version: shard.segments.is_on_disk([f"w{v}"]))
            nothing = await store.return_to_whole(RUN, term=term)
            assert (list(nothing.run.returns), list(nothing.reset_policies)) == ([], [])
            path = Path(shard.segments.find("w1").view.disk_path)
        path.unlink()  # noqa: ASYNC240 - version 1 had not come that far
        folder.rename(tmp_path / "two")  # and the folder is another one now
        async with serving(tmp_path / "two") as (store, _):
            with pytest.raises(FlexMarlError, match="was never issued"):
                await store.return_to_whole(RUN, term=term + 1)
            for _ in range(2):
                answer = await store.return_to_whole(RUN, term=term)
                assert [(r.version, r.newest) for r in answer.run.returns] == [(0, 1)]
            assert (await store.get_manifest(RUN)).version == 0
            state = await store.get_state(RUN, "p")
            assert (state.version, state.weights.key, list(state.ledger)) == (0, "w0", [])
            assert await read(store, "w0") == (0, pb.SEGMENT_TIER_DISK)
            ref = await store.set(RUN, "w1b", [buffer(9)])
            await save(store, 1, ref)
            await commit(store, term, 1, await store.get_state(RUN, "p"))
        async with serving(tmp_path / "two") as (store, _):
            assert (await store.get_manifest(RUN)).policies["p"].weights.key == "w1b"

    async def test_a_lost_sum_costs_the_sum_alone(self, tmp_path):
        async with serving(tmp_path, state_to_disk_every=1) as (store, shard):
            await store.create_run(a_run())
            term = await store.acquire_term(RUN, "orchestrator", holder="test")
            weights = await put(store, shard, "w0", 0)
            await save(store, 0, weights)
            await commit(store, term, 0, await store.get_state(RUN, "p"))
            await until(lambda: shard.segments.is_on_disk(["w0"]))
            gradients = await put(store, shard, "g", 7)
            await save(store, 0, weights, gradients=gradients, ledger=["b000000a0-m0000-p"])
        async with serving(tmp_path) as (store, _):
            answer = await store.return_to_whole(RUN, term=term)
            assert (list(answer.run.returns), list(answer.reset_policies)) == ([], ["p"])
            state = await store.get_state(RUN, "p")
            assert (list(state.ledger), state.gradients.key) == ([], "")

    async def test_a_run_of_which_nothing_is_whole_says_so(self, tmp_path):
        async with serving(tmp_path) as (store, shard):
            await store.create_run(a_run())
            term = await store.acquire_term(RUN, "orchestrator", holder="test")
            await save(store, 0, await put(store, shard, "w0", 0))
            await commit(store, term, 0, await store.get_state(RUN, "p"))
        async with serving(tmp_path) as (store, _):
            with pytest.raises(NotFoundError, match="no version is whole"):
                await store.return_to_whole(RUN, term=term)


class TestPins:
    async def test_pinned_version_outlives_its_turn(self, tmp_path):
        async with serving(tmp_path, retain_versions=1) as (store, shard):
            await store.create_run(a_run())
            term = await store.acquire_term(RUN, "orchestrator", holder="test")
            await commit(store, term, 0, await put(store, shard, "w0", 0))
            async with store.pinned_version(RUN, 0, holder="export", ttl_s=60):
                await commit(store, term, 1, await put(store, shard, "w1", 1))
                await commit(store, term, 2, await put(store, shard, "w2", 2))
                assert await read(store, "w0") == (0, pb.SEGMENT_TIER_MEMORY)
            await commit(store, term, 3, await put(store, shard, "w3", 3))
            with pytest.raises(NotFoundError, match="SEGMENT_NOT_FOUND"):
                await read(store, "w0")
            with pytest.raises(NotFoundError, match="keeps no state of version 0"):
                async with store.pinned_version(RUN, 0, holder="late", ttl_s=60):
                    pass
            with pytest.raises(FlexMarlError, match="ttl_s"):
                async with store.pinned_version(RUN, 3, holder="greedy", ttl_s=1e9):
                    pass

    async def test_deadline_holds_over_restarts_and_jumps_of_the_wall_clock(
        self, tmp_path, monkeypatch
    ):
        async with serving(tmp_path) as (store, shard):
            await store.create_run(a_run())
            term = await store.acquire_term(RUN, "orchestrator", holder="test")
            await commit(store, term, 0, await put(store, shard, "w0", 0))
            request = pb.PinVersionRequest(
                request_id="pin", run_id=RUN, version=0, holder="x", ttl_s=60
            )
            await store._stub.PinVersion(request)
            monkeypatch.setattr(pins.time, "time_ns", lambda: 10**20)
            assert shard.training._pins.versions(RUN) == [0]
            monkeypatch.undo()
        for shift_s, still in ((-(10**6), [0]), (30, [0]), (61, [])):
            moved = time.time_ns() + shift_s * 10**9
            monkeypatch.setattr(pins.time, "time_ns", lambda moved=moved: moved)
            async with serving(tmp_path) as (_, shard):
                monkeypatch.undo()
                assert shard.training._pins.versions(RUN) == still
                left_s = max(p.ends_at for p in shard.training._pins._of(RUN).values())
                assert left_s <= time.monotonic() + 60


class TestOtherStores:
    async def test_segment_is_streamed_once_and_is_the_same(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        async with (
            serving(tmp_path / "a", shard="s0") as (owner, owner_shard),
            serving(tmp_path / "b", shard="s1") as (reader, _),
        ):
            for store in (owner, reader):
                await store.create_run(a_run())
            large = buffer(7, size=(3 << 20) + 64)
            ref = await owner.set(RUN, "w", [large], attributes={"kind": "weights"})
            source = common.ShardAddress(name="s0", address=owner.address)
            both = [reader.fetch_segment(RUN, "w", source=source) for _ in range(2)]
            answers = await asyncio.gather(*both)
            assert sorted(answer.streamed for answer in answers) == [False, True]
            async with reader.get(RUN, "w") as copy:
                assert bytes(copy.buffers["w"].data) == bytes(large.data)
                assert copy.attributes["kind"] == "weights"
                assert copy.attributes[FETCHED_FROM] == "s0"
                assert (copy.object.shard, copy.object.size_bytes) == ("s1", ref.size_bytes)
            await owner_shard.wait_checksum("w")
            assert owner_shard.segments.num_leases == 0

    async def test_one_transfer_of_a_key_at_a_time_also_after_one_that_failed(
        self, opened, monkeypatch
    ):
        fetches = opened[1].fetches
        request = pb.FetchSegmentRequest(run_id=RUN, key="w")
        running = most = 0

        async def fails(_request):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            raise DomainError(ErrorReason.UNAVAILABLE, "the source is down")

        monkeypatch.setattr(fetches, "_copy", fails)
        first, second = (asyncio.create_task(fetches.fetch(request)) for _ in range(2))
        await asyncio.wait([first])
        third = asyncio.create_task(fetches.fetch(request))  # while the second one is at it
        failed = await asyncio.gather(first, second, third, return_exceptions=True)
        assert all(isinstance(error, DomainError) for error in failed)
        assert most == 1
        assert not fetches._locks

    async def test_damage_on_the_way_is_found(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        async with (
            serving(tmp_path / "a") as (owner, shard),
            serving(tmp_path / "b", shard="s1") as (reader, reader_shard),
        ):
            for store in (owner, reader):
                await store.create_run(a_run())
            await put(owner, shard, "w", 1)
            shard.segments.find("w").file.path.write_bytes(b"x" * SIZE)
            source = common.ShardAddress(name="s0", address=owner.address)
            with pytest.raises(FlexMarlError, match="CHECKSUM_MISMATCH"):
                await reader.fetch_segment(RUN, "w", source=source)
            with pytest.raises(NotFoundError, match="SEGMENT_NOT_FOUND"):
                await read(reader, "w")
            with pytest.raises(NotFoundError, match="SEGMENT_NOT_FOUND"):
                await reader.fetch_segment(RUN, "unknown", source=source)
            assert reader_shard.fetches._locks == {}

    async def test_source_that_is_down_is_named(self, tmp_path):
        async with serving(tmp_path) as (store, _):
            await store.create_run(a_run())
            source = common.ShardAddress(name="s7", address="127.0.0.1:1")
            store._patience_s = 0.0
            with pytest.raises(UnavailableError, match="s7"):
                await store.fetch_segment(RUN, "w", source=source)

    async def test_copies_leave_a_full_memory_tier_first(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        async with (
            serving(tmp_path / "a") as (owner, owner_shard),
            serving(tmp_path / "b", shard="s1", memory_tier_bytes=2 * SIZE) as (store, shard),
        ):
            for each in (owner, store):
                await each.create_run(a_run())
            await put(owner, owner_shard, "theirs", 9)
            await put(store, shard, "ours", 1)
            source = common.ShardAddress(name="s0", address=owner.address)
            await store.fetch_segment(RUN, "theirs", source=source)
            await put(store, shard, "new", 2)
            assert await read(store, "ours") == (1, pb.SEGMENT_TIER_MEMORY)
            assert shard.segments.find("theirs") is None


def test_a_segment_that_was_cut_short_has_no_copy(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"x" * 100)
    target.write_bytes(bytes(128))
    with pytest.raises(OSError, match=f"{source} ends 28 bytes before its copy"):
        copy_file(source, target, durably=False)


@pytest.mark.parametrize(
    ("tier", "is_synced"), [(pb.SEGMENT_TIER_MEMORY, False), (pb.SEGMENT_TIER_DISK, True)]
)
async def test_a_segment_costs_a_flush_only_where_it_survives_the_host(tmp_path, tier, is_synced):
    async with serving(tmp_path, durability="fsync") as (store, shard):
        await store.create_run(a_run())
        before = shard.database.writer.num_syncs
        specs = [BufferSpec("a", "U8", (9,))]
        async with store.allocate_segment(RUN, "s", specs, tier=tier) as writer:
            assert shard.database.writer.num_syncs == before
            await writer.seal(checksum="sha256:0")
        assert (shard.database.writer.num_syncs > before) is is_synced
        await store.acquire_term(RUN, "policy/p", holder="x")
        assert shard.database.writer.num_syncs > before + is_synced
