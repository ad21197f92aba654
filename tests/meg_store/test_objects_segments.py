"""Objects by content, segments by path."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import time

import pytest
from meg_store.store_harness import RUN, a_run, serving

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.errors import FlexMarlError
from flexmarl.meg_store.backend import Table

SPECS = [BufferSpec("a", "F32", (3, 5)), BufferSpec("b", "I64", ())]

WRITER = f"""
import asyncio, sys
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.store import StoreClient

async def write():
    async with StoreClient.connect(sys.argv[1]) as store:
        writer = await store.allocate_segment({RUN!r}, "s1", [BufferSpec("b", "I64", ())])
        print("open", flush=True)
        await asyncio.sleep(600)

asyncio.run(write())
"""

READER = f"""
import asyncio, sys
from flexmarl.client.store import StoreClient

async def read():
    async with StoreClient.connect(sys.argv[1]) as store, store.get({RUN!r}, "s1"):
        print("open", flush=True)
        await asyncio.sleep(600)

asyncio.run(read())
"""


async def refusal(awaitable) -> str:
    with pytest.raises(FlexMarlError) as caught:
        await awaitable
    return caught.value.reason.value


def pieces(shard) -> int:
    return sum(1 for _ in shard.database.backend.scan(Table.BLOBS, b"", None))


class TestObjects:
    @pytest.mark.parametrize("size", [0, 1, 1 << 20, (5 << 20) + 17])
    async def test_content_comes_back(self, opened, tmp_path, size):
        store = opened[0]
        data = os.urandom(size)
        ref = await store.put_object(data)
        assert ref.key == ref.checksum == f"sha256:{hashlib.sha256(data).hexdigest()}"
        assert (ref.shard, ref.size_bytes) == ("s0", size)
        assert await store.get_object(ref.key) == data
        await store.download_object(ref.key, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == data

    async def test_ranges(self, opened):
        store = opened[0]
        data = os.urandom((2 << 20) + 5)
        ref = await store.put_object(data, key="named")
        edge = 1 << 20
        for offset, length in ((0, 3), (edge - 2, 4), (edge, edge), (len(data) - 1, 1)):
            part = await store.get_object(ref.key, offset=offset, length=length)
            assert part == data[offset : offset + length]
        assert await store.get_object(ref.key, offset=edge) == data[edge:]
        outside = store.get_object(ref.key, offset=5, length=len(data))
        assert await refusal(outside) == "INVALID_ARGUMENT"

    async def test_same_content_is_stored_once(self, opened):
        store, shard = opened
        (first, second) = [await store.put_object(b"x" * 100) for _ in range(2)]
        assert first == second
        assert pieces(shard) == 1

    async def test_key_keeps_its_content(self, opened):
        store, shard = opened
        await store.put_object(b"one", key="k")
        assert await refusal(store.put_object(b"two", key="k")) == "CONTENT_MISMATCH"
        lie = store.put_object(b"two", key="sha256:" + "0" * 64)
        assert await refusal(lie) == "CONTENT_MISMATCH"
        assert await store.get_object("k") == b"one"
        await store.put_object(b"after")  # everything before is written
        assert pieces(shard) == 2

    @pytest.mark.parametrize("key", ["../x", "a/b", "", ".hidden", "x" * 300])
    async def test_keys_are_no_paths(self, opened, key):
        if key:
            assert await refusal(opened[0].put_object(b"x", key=key)) == "INVALID_ARGUMENT"
        assert await refusal(opened[0].get_object(key)) == "OBJECT_NOT_FOUND"

    async def test_broken_uploads_leave_nothing(self, opened):
        store, shard = opened

        async def upload(*chunks, **header):
            async def parts():
                yield pb.PutObjectRequest(header=pb.PutObjectHeader(**header))
                for chunk in chunks:
                    yield pb.PutObjectRequest(chunk=chunk)

            return await store._stub.PutObject(parts())

        assert await refusal(upload(b"abc", size_bytes=2)) == "INVALID_ARGUMENT"
        assert await refusal(upload(b"abc", size_bytes=4)) == "CHECKSUM_MISMATCH"
        wrong = upload(b"abc", size_bytes=3, checksum="sha256:0")
        assert await refusal(wrong) == "CHECKSUM_MISMATCH"
        too_large = upload(size_bytes=(1 << 30) + 1)
        assert await refusal(too_large) == "MESSAGE_TOO_LARGE"
        large_chunk = upload(b"x" * ((1 << 20) + 1), size_bytes=2 << 20)
        assert await refusal(large_chunk) == "INVALID_ARGUMENT"
        await store.put_object(b"after")  # everything before is written
        assert pieces(shard) == 1

    async def test_references_keep_objects_alive(self, opened):
        store, shard = opened
        dataset = await store.put_object(b"rows")
        await store.put_object(b"nobody's")
        missing = a_run(dataset=common.ObjectRef(key="sha256:1"))
        assert await refusal(store.create_run(missing)) == "OBJECT_NOT_FOUND"
        model = graph.ModelRef(archive=dataset)
        await store.create_run(a_run(dataset=dataset, models={"p": model}))
        assert shard.objects.require(dataset.key).reference_count == 2
        for now, removed in ((0.0, 0), (3599.0, 0), (3600.0, 1), (9999.0, 0)):
            assert await shard.objects.sweep_orphans(ttl_s=3600, now=now) == removed
        assert await store.get_object(dataset.key) == b"rows"
        assert pieces(shard) == 1

    async def test_dead_upload_is_removed_at_start(self, tmp_path):
        async with serving(tmp_path) as (store, shard):
            await store.put_object(b"kept")
            draft = shard.database.begin()
            draft.put(Table.META, b"upload\0" + b"\0" * 16, b"")
            draft.put(Table.BLOBS, b"\0" * 16 + b"\0\0\0\0", b"left")
            await shard.database.commit(draft)
            assert pieces(shard) == 2
        async with serving(tmp_path) as (store, shard):
            await store.put_object(b"kept")
            assert pieces(shard) == 1


class TestRuns:
    async def test_same_run_is_answered_another_refused(self, opened):
        store = opened[0]
        stored = await store.create_run(a_run())
        assert stored.status == common.RUN_STATUS_SUBMITTED
        assert await store.create_run(a_run()) == stored
        assert await refusal(store.create_run(a_run(config_json=b"[]"))) == "ALREADY_EXISTS"
        assert [r.run_id for r in await store.list_runs()] == [RUN]

    @pytest.mark.parametrize(
        "changes",
        [
            {"run_id": "../x"},
            {"run_id": ""},
            {"status": common.RUN_STATUS_RUNNING},
            {"shards": [common.ShardAddress(name="elsewhere")]},
            {"columns": [graph.Column(name="c")]},
        ],
    )
    async def test_malformed_run_is_refused(self, opened, changes):
        assert await refusal(opened[0].create_run(a_run(**changes))) == "INVALID_ARGUMENT"

    async def test_states(self, store, term):
        running = await store.update_run_status(RUN, common.RUN_STATUS_RUNNING, term=term)
        assert running.status == common.RUN_STATUS_RUNNING
        failure = common.Failure(reason="DATASET_INVALID", message="m")
        failed = await store.update_run_status(
            RUN, common.RUN_STATUS_FAILED, term=term, failure=failure
        )
        assert failed.failure == failure
        done = store.update_run_status(RUN, common.RUN_STATUS_FINISHED, term=term)
        assert await refusal(done) == "STATE_TRANSITION_REFUSED"
        stale = store.update_run_status(RUN, common.RUN_STATUS_RUNNING, term=0)
        assert await refusal(stale) == "TERM_STALE"

    async def test_shards_may_move_but_not_change(self, opened):
        store = opened[0]
        shards = [common.ShardAddress(name=name, address="h:1") for name in ("s0", "s1")]
        await store.create_run(a_run(shards=shards))
        term = await store.acquire_term(RUN, "orchestrator", holder="test")
        running = common.RUN_STATUS_RUNNING
        shards[1].address = "h:2"
        run = await store.update_run_status(RUN, running, term=term, shards=shards)
        assert (list(run.shards), await store.get_run(RUN)) == (shards, run)
        other = store.update_run_status(RUN, running, term=term, shards=shards[:1])
        assert await refusal(other) == "INVALID_ARGUMENT"

    async def test_client_stops_a_run_without_a_term(self, store, term):
        stopped = await store.update_run_status(RUN, common.RUN_STATUS_STOPPED, term=0)
        assert stopped.status == common.RUN_STATUS_STOPPED


class TestSegments:
    async def test_buffers_come_back_under_a_lease(self, store):
        async with store.allocate_segment(
            RUN, "s1", SPECS, attributes={"kind": "weights"}
        ) as writer:
            writer.buffers["a"].data[:] = bytes(range(60))
            writer.buffers["b"].data[:] = b"12345678"
            written = writer.content_hash()
        async with store.open_segment(RUN, "s1", holder="test") as reader:
            assert bytes(reader.buffers["a"].data) == bytes(range(60))
            assert reader.buffers["a"].shape == (3, 5)
            assert reader.attributes["kind"] == "weights"
            assert reader.content_hash() == written
            assert (await store.get_stats()).numbers["leases"] == 1
            with pytest.raises(TypeError, match="read-only"):
                reader.buffers["a"].data[0] = 1
        assert (await store.get_stats()).numbers["leases"] == 0

    async def test_checksum_is_computed_beside(self, opened, store):
        async with store.allocate_segment(RUN, "s1", SPECS) as writer:
            writer.buffers["a"].data[:] = b"y" * 60
            expected = writer.content_hash()
        await opened[1].wait_checksum("s1")
        async with store.open_segment(RUN, "s1", holder="test") as reader:
            assert reader.object.checksum == expected

    async def test_unsealed_is_invisible_and_replaced(self, opened, store):
        dead = await store.allocate_segment(RUN, "s1", SPECS)
        assert await refusal(store._open(RUN, "s1", holder="x")) == "SEGMENT_NOT_FOUND"
        with pytest.raises(RuntimeError, match="died"):
            async with store.allocate_segment(RUN, "s1", SPECS) as writer:
                raise RuntimeError("died")
        (left,) = opened[1].config.memory_dir.glob("*.seg")
        assert (str(left) == writer.path) and (writer.path != dead.path)
        async with store.allocate_segment(RUN, "s1", SPECS):
            pass
        assert await refusal(store._allocate(RUN, "s1", SPECS, tier=0, attributes={})) == (
            "CONTENT_MISMATCH"
        )
        assert len(list(opened[1].config.memory_dir.glob("*.seg"))) == 1

    async def test_names_on_disk_come_from_a_hash(self, store):
        for key in ("../../x", "a/b", ""):
            assert await refusal(store._allocate(RUN, key, SPECS, tier=0, attributes={})) == (
                "INVALID_ARGUMENT"
            )
        writer = await store.allocate_segment(RUN, "my.key", SPECS)
        assert "my.key" not in writer.path

    async def test_layout_is_checked(self, store):
        writer = await store.allocate_segment(RUN, "s1", SPECS)
        too_long = pb.NamedBuffer(name="a", dtype="U8", shape=[999], offset=0, size_bytes=999)
        odd = pb.NamedBuffer(name="a", dtype="U8", shape=[1], offset=3, size_bytes=1)
        lie = pb.NamedBuffer(name="a", dtype="F32", shape=[2], offset=0, size_bytes=4)
        unknown = pb.NamedBuffer(name="a", dtype="Q3", shape=[2], offset=0, size_bytes=4)
        for buffers in ([too_long], [odd], [lie], [unknown], [*writer.layout, writer.layout[0]]):
            assert await refusal(store.seal_segment(RUN, "s1", buffers)) == "INVALID_ARGUMENT"
        assert (await writer.seal()).size_bytes == 128

    async def test_full_memory_tier_falls_to_disk_and_says_so(self, tmp_path):
        async with serving(tmp_path, memory_tier_bytes=1000) as (store, _):
            await store.create_run(a_run())
            small = await store.allocate_segment(RUN, "s1", [BufferSpec("a", "U8", (640,))])
            large = await store.allocate_segment(RUN, "s2", [BufferSpec("a", "U8", (640,))])
            asked = await store.allocate_segment(RUN, "s3", SPECS, tier=pb.SEGMENT_TIER_DISK)
        assert small.tier == pb.SEGMENT_TIER_MEMORY
        assert large.tier == asked.tier == pb.SEGMENT_TIER_DISK

    async def test_repeated_allocation_has_the_first_file(self, opened, store):
        request = pb.AllocateSegmentRequest(request_id="same", run_id=RUN, key="s1", size_bytes=100)
        first, second = [await store._stub.AllocateSegment(request) for _ in range(2)]
        assert first == second
        assert (await store.get_stats()).numbers["memory_tier_bytes"] == 100

    async def test_restart_keeps_sealed_and_unsealed_and_removes_the_rest(self, tmp_path):
        shm = tmp_path / "shm"
        async with serving(tmp_path, shm_dir=shm) as (store, _):
            await store.create_run(a_run())
            async with store.allocate_segment(RUN, "sealed", SPECS):
                pass
            unsealed = await store.allocate_segment(RUN, "unsealed", SPECS)
            (shm / "stray.seg").write_bytes(b"x")
            unsealed.buffers["b"].data[:] = b"publish!"
        async with serving(tmp_path, shm_dir=shm) as (store, shard):
            assert not (shm / "stray.seg").exists()
            async with store.open_segment(RUN, "sealed", holder="x"):
                pass
            await store.seal_segment(RUN, "unsealed", unsealed.layout)
            async with store.open_segment(RUN, "unsealed", holder="x") as reader:
                assert bytes(reader.buffers["b"].data) == b"publish!"
                await shard.wait_checksum("sealed")  # which holds it
                # A reader may still map a file of the former life: it is never reused.
                freed = await shard.segments.sweep(
                    orphan_ttl_s=-1, lease_max_s=60, now=time.monotonic()
                )
                assert freed == 1
            assert shard.files.pool_bytes == 0
        assert [path.name for path in shm.iterdir()] == [os.path.basename(unsealed.path)]

    async def test_memory_tier_lost_with_the_host_is_told_and_survived(self, tmp_path):
        async with serving(tmp_path) as (store, shard):
            await store.create_run(a_run())
            writer = await store.allocate_segment(RUN, "s1", SPECS)
            shard._start_checksum = lambda key: None
            shard.segments._background = lambda key: None
            await writer.seal()
        async with serving(tmp_path) as (store, shard):
            assert await refusal(store._open(RUN, "s1", holder="x")) == "SEGMENT_NOT_FOUND"
            await shard.wait_checksum("s1")
            assert (
                await shard.segments.sweep(orphan_ttl_s=-1, lease_max_s=60, now=time.monotonic())
                == 1
            )
            assert (await store.get_stats()).numbers["memory_tier_bytes"] == 0

    async def test_disk_tier_survives_the_memory_tiers_loss(self, tmp_path):
        async with serving(tmp_path) as (store, _):
            await store.create_run(a_run())
            async with store.allocate_segment(
                RUN, "s1", SPECS, tier=pb.SEGMENT_TIER_DISK
            ) as writer:
                writer.buffers["b"].data[:] = b"on disk!"
        async with (
            serving(tmp_path) as (store, _),
            store.open_segment(RUN, "s1", holder="x") as reader,
        ):
            assert bytes(reader.buffers["b"].data) == b"on disk!"

    async def test_forgotten_lease_ends_but_its_pages_are_not_reused(self, opened, store):
        shard = opened[1]
        async with store.allocate_segment(RUN, "s1", SPECS):
            pass
        await shard.wait_checksum("s1")
        reader = await store.open_segment(RUN, "s1", holder="dead")
        later = time.monotonic() + 100
        assert await shard.segments.sweep(orphan_ttl_s=-1, lease_max_s=50, now=later) == 1
        assert shard.files.pool_bytes == 0
        assert bytes(reader.buffers["b"].data) == bytes(8)

    async def test_leases_of_a_killed_reader_end_without_their_age(self, opened, store):
        shard = opened[1]
        async with store.allocate_segment(RUN, "s1", SPECS):
            pass
        await shard.wait_checksum("s1")
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-c", READER, store.address, stdout=asyncio.subprocess.PIPE
        )
        assert reader.stdout is not None
        assert await asyncio.wait_for(reader.stdout.readline(), timeout=50) == b"open\n"

        async def sweep() -> float:
            later = time.monotonic() + 100
            await shard.segments.sweep(orphan_ttl_s=-1, lease_max_s=3600, now=later)
            return (await store.get_stats()).numbers["leases"]

        assert await sweep() == 1, "it is at work"
        reader.send_signal(signal.SIGSTOP)
        assert await sweep() == 1, "it only stands still"
        async with store.open_segment(RUN, "s1", holder="another"):
            reader.kill()
            await reader.wait()
            assert await sweep() == 2, "who else reads it keeps it"
        assert await sweep() == 0
        assert len(shard.segments) == 0
        assert shard.files.pool_bytes == 0

    async def test_what_a_killed_process_was_to_fill_goes_without_its_age(self, opened, store):
        shard = opened[1]
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITER, store.address, stdout=asyncio.subprocess.PIPE
        )
        assert writer.stdout is not None
        assert await asyncio.wait_for(writer.stdout.readline(), timeout=50) == b"open\n"

        async def sweep() -> int:
            later = time.monotonic() + 100
            return await shard.segments.sweep(orphan_ttl_s=3600, lease_max_s=3600, now=later)

        assert await sweep() == 0, "it is at work"
        writer.send_signal(signal.SIGSTOP)
        assert await sweep() == 0, "it only stands still"
        writer.kill()
        await writer.wait()
        assert await sweep() == 1
        numbers = (await store.get_stats()).numbers
        assert numbers["memory_tier_bytes"] == 0
        assert shard.files.pool_bytes == 0, "who was killed may have had others write, too"

    async def test_what_was_given_up_goes_and_what_is_sealed_late_stays(self, opened, store):
        shard = opened[1]
        given_up = await store.allocate_segment(RUN, "s1", SPECS)
        late = await store.allocate_segment(RUN, "s2", SPECS)
        given_up.abandon()
        now = time.monotonic()
        await shard.segments.sweep(orphan_ttl_s=3600, lease_max_s=3600, now=now)
        assert len(shard.segments) == 2, "its lock may still be to come"
        await shard.segments.sweep(orphan_ttl_s=3600, lease_max_s=3600, now=now + 100)
        assert [segment.key for segment in shard.segments.of_run(RUN)] == ["s2"]
        late.buffers["b"].data[:] = b"late but"
        await late.seal()
        await shard.segments.sweep(orphan_ttl_s=3600, lease_max_s=3600, now=now + 100)
        async with store.open_segment(RUN, "s2", holder="x") as reader:
            assert bytes(reader.buffers["b"].data) == b"late but"

    async def test_leases_that_the_store_holds_for_others_have_no_lock(self, opened, store):
        shard = opened[1]
        async with store.allocate_segment(RUN, "s1", SPECS):
            pass
        await shard.wait_checksum("s1")
        now = time.monotonic()
        shard.segments.open(pb.OpenSegmentRequest(run_id=RUN, key="s1"), now=now)
        await shard.segments.sweep(orphan_ttl_s=-1, lease_max_s=3600, now=now + 100)
        assert shard.segments.num_leases == 1

    async def test_a_jump_of_the_wall_clock_ends_nothing_that_is_about_to_be_named(
        self, opened, store, monkeypatch
    ):
        monkeypatch.setattr(time, "time_ns", lambda: 1)
        await store.put_object(b"about to be named")
        async with store.allocate_segment(RUN, "s1", SPECS):
            pass
        monkeypatch.undo()  # as if the clock went on by half a century
        now, shard = time.monotonic(), opened[1]
        assert await shard.objects.sweep_orphans(ttl_s=3600, now=now) == 0
        assert await shard.segments.sweep(orphan_ttl_s=3600, lease_max_s=60, now=now) == 0
        assert await shard.objects.sweep_orphans(ttl_s=3600, now=now + 3601) == 1
        assert await shard.segments.sweep(orphan_ttl_s=3600, lease_max_s=60, now=now + 3601) == 1
