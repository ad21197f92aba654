"""The store's client: patience, one request id per call, segments of dead files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from meg_store.store_harness import RUN, a_run, serving
from ports import own_port

from flexmarl.client.buffers import BufferSpec
from flexmarl.client.errors import DeadlineError, UnavailableError
from flexmarl.client.store import StoreClient
from flexmarl.core.call_context import set_deadline
from flexmarl.core.errors import DomainError, ErrorReason


def unused_address() -> str:
    return f"127.0.0.1:{own_port()}"


async def test_patience_ends():
    async with StoreClient.connect(unused_address(), patience_s=0.3) as store:
        for call in (store.get_run(RUN), store.get_object("x"), anext(store.watch(RUN))):
            with pytest.raises(UnavailableError):
                await call
        with pytest.raises(UnavailableError):
            await store.wait_ready(timeout_s=0.1)


async def test_callers_deadline_bounds_patience():
    set_deadline(time.monotonic() + 0.5)
    async with StoreClient.connect(unused_address(), patience_s=3600) as store:
        with pytest.raises((UnavailableError, DeadlineError)):
            await store.get_run(RUN)


async def test_lists_follow_their_pages(tmp_path):
    async with serving(tmp_path, backend="memory") as (store, _):
        for number in range(120):
            await store.create_run(a_run(run_id=f"run-{number}"))
        runs = await store.list_runs()
        assert len({run.run_id for run in runs}) == 120
        assert [run.run_id for run in runs][:1] == ["run-119"]


async def test_object_from_a_file(tmp_path):
    path = tmp_path / "data.bin"
    data = os.urandom(3 << 20)
    path.write_bytes(data)
    async with serving(tmp_path / "store", backend="memory") as (store, _):
        ref = await store.put_object(path)
        assert await store.put_object(data) == ref
        assert await store.get_object(ref.key) == data


async def test_view_in_use_keeps_its_lease(tmp_path):
    async with serving(tmp_path, backend="memory") as (store, _):
        await store.create_run(a_run())
        async with store.allocate_segment(RUN, "s", [BufferSpec("a", "U8", (9,))]) as writer:
            writer.buffers["a"].data[:] = b"123456789"
        reader = await store.open_segment(RUN, "s", holder="x")
        kept = memoryview(reader.buffers["a"].data)
        await reader.close()
        assert bytes(kept) == b"123456789"
        assert (await store.get_stats()).numbers["leases"] == 1


async def test_file_that_is_not_here_or_cut_short_is_told_and_leaves_no_lease(tmp_path):
    async with serving(tmp_path, backend="memory") as (store, shard):
        await store.create_run(a_run())
        async with store.allocate_segment(RUN, "s", [BufferSpec("a", "U8", (99,))]) as writer:
            await writer.seal(checksum="sha256:0")  # so that nobody maps it to compute one
        segment = shard.segments.of_run(RUN)[0]
        path = Path(segment.view.path)
        os.truncate(path, 98)
        with pytest.raises(DomainError, match=f"segment s is cut short: {path} has 98") as caught:
            await store.open_segment(RUN, "s", holder="x")
        assert caught.value.reason is ErrorReason.CHECKSUM_MISMATCH
        os.truncate(path, 0)
        with pytest.raises(DomainError, match=f"segment s is cut short: {path} is empty"):
            await store.open_segment(RUN, "s", holder="x")
        segment.view.path += ".elsewhere"
        with pytest.raises(DomainError, match=f"segment s: {path}.elsewhere cannot be") as caught:
            await store.open_segment(RUN, "s", holder="x")
        assert caught.value.reason is ErrorReason.SEGMENT_NOT_FOUND
        assert (await store.get_stats()).numbers["leases"] == 0
