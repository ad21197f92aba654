"""Decisions see what is queued; readers see what is acknowledged; the queue is bounded."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from contextlib import asynccontextmanager

import pytest

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import Batch, Table
from flexmarl.meg_store.database import Database, DatabaseConfig
from flexmarl.meg_store.large_calls import LARGE_BYTES
from flexmarl.meg_store.memory_backend import MemoryBackend
from flexmarl.meg_store.writer import GROUP_BYTES


class GatedBackend(MemoryBackend):
    """Writes wait until the gate opens; counts groups and flushes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.groups: list[int] = []
        self.flushes = 0
        self.error: Exception | None = None

    def write(self, batches: Sequence[Batch]) -> None:
        self.gate.wait(timeout=20)
        if self.error is not None:
            raise self.error
        self.groups.append(len(batches))
        super().write(batches)

    def flush(self) -> None:
        self.flushes += 1


@asynccontextmanager
async def gated(**config):
    backend = GatedBackend()
    failures: list[BaseException] = []
    database = Database(backend, config=DatabaseConfig(**config), on_fatal=failures.append)
    try:
        yield database, backend, failures
    finally:
        backend.gate.set()
        await database.close()


def write(database: Database, key: bytes, value: bytes, **options) -> asyncio.Task[None]:
    return write_to(database, Table.META, key, value, **options)


def write_to(
    database: Database, table: Table, key: bytes, value: bytes, **options
) -> asyncio.Task[None]:
    draft = database.begin()
    draft.put(table, key, value)
    return asyncio.ensure_future(database.commit(draft, **options))


def answer(number: int):
    def build(draft):
        draft.put(Table.META, b"counted", bytes((number,)))
        return pb.AcquireTermResponse(term=number)

    return build


async def test_decisions_see_queued_writes_readers_do_not():
    async with gated() as (database, backend, _):
        first = write(database, b"a", b"1")
        await asyncio.sleep(0)
        draft = database.begin()
        assert draft.get(Table.META, b"a") == b"1"
        draft.delete(Table.META, b"a")
        assert draft.get(Table.META, b"a") is None
        assert database.get(Table.META, b"a") is None
        second = asyncio.ensure_future(database.commit(draft))
        await asyncio.sleep(0)
        assert database.staged(Table.META, b"a") is None
        backend.gate.set()
        await asyncio.gather(first, second)
        assert database.get(Table.META, b"a") is None
        assert not any(database._pending)


@pytest.mark.parametrize("size", [0, LARGE_BYTES])
async def test_a_call_is_told_from_another_under_its_id(size):
    async with gated() as (database, backend, _):
        backend.gate.set()
        first = bytes(size) + b"a"
        answered = await database.mutate("r", "id", first, answer(7))
        assert await database.mutate("r", "id", first, answer(8)) == answered
        for other in (bytes(size) + b"b", bytes(size) + b"\0a", b"a" + bytes(size + 1)):
            with pytest.raises(DomainError) as caught:
                await database.mutate("r", "id", other, answer(9))
            assert caught.value.reason is ErrorReason.REQUEST_ID_REUSED


async def test_a_large_call_that_an_earlier_version_answered_is_known():
    async with gated() as (database, backend, _):
        backend.gate.set()
        call = bytes(LARGE_BYTES)
        key = keys.join("id", "r", "id")
        answered = answer(7)(database.begin()).SerializeToString()
        await write_to(database, Table.REQUESTS, key, hashlib.sha256(call).digest()[:16] + answered)
        assert await database.mutate("r", "id", call, answer(8)) == answered
        with pytest.raises(DomainError, match="REQUEST_ID_REUSED"):
            await database.mutate("r", "id", call + b"x", answer(9))


async def test_writes_that_wait_share_one_flush():
    async with gated() as (database, backend, _):
        writes = [write(database, b"%d" % n, b"x") for n in range(50)]
        await asyncio.sleep(0.05)
        backend.gate.set()
        await asyncio.gather(*writes)
        assert sum(backend.groups) == 50
        assert backend.flushes == len(backend.groups) <= 3


async def test_groups_are_bounded_so_that_single_writes_do_not_wait():
    async with gated() as (database, backend, _):
        writes = [write(database, b"%d" % n, b"x" * (300 << 10)) for n in range(20)]
        await asyncio.sleep(0.05)
        backend.gate.set()
        await asyncio.gather(*writes)
        assert max(backend.groups) <= 4


@pytest.mark.parametrize(
    ("always", "options", "flushes"),
    [
        (True, {}, 1),
        (True, {"lazy": True}, 0),
        (False, {}, 0),
        (False, {"sync": True}, 1),
    ],
)
async def test_what_is_synced(always, options, flushes):
    async with gated(always_sync=always) as (database, backend, _):
        backend.gate.set()
        await write(database, b"a", b"1", **options)
        assert backend.flushes == flushes


async def test_full_queue_pushes_back_and_recovers():
    async with gated(max_queued_bytes=1000) as (database, backend, _):
        queued = write(database, b"a", b"x" * 2000)
        await asyncio.sleep(0)
        with pytest.raises(DomainError) as caught:
            database.begin()
        assert caught.value.reason is ErrorReason.QUEUE_FULL
        backend.gate.set()
        await queued
        await write(database, b"b", b"x")


async def test_repeated_call_waits_for_the_first_ones_write():
    async with gated() as (database, backend, _):
        first = asyncio.ensure_future(database.mutate("r", "id", b"p", answer(7)))
        await asyncio.sleep(0)
        again = asyncio.ensure_future(database.mutate("r", "id", b"p", answer(8)))
        with pytest.raises(DomainError) as caught:
            await database.mutate("r", "id", b"other", answer(9))
        assert caught.value.reason is ErrorReason.REQUEST_ID_REUSED
        await asyncio.sleep(0.02)
        assert not again.done()
        backend.gate.set()
        assert await first == await again
        assert database.get(Table.META, b"counted") == bytes((7,))
        elsewhere = await database.mutate("other run", "id", b"p", answer(9))
        assert elsewhere != await first


async def test_a_small_call_goes_between_large_ones():
    decided: list[str] = []

    def noted(name: str):
        def build(draft):
            decided.append(name)
            return pb.CommitResponse()

        return build

    async def small(database):
        for _ in range(3):  # its bytes are read, its handler starts, ...
            await asyncio.sleep(0)
        await database.mutate("r", "small", b"", noted("small"))

    async with gated() as (database, backend, _):
        backend.gate.set()
        large = [
            database.mutate("r", name, bytes(LARGE_BYTES), noted(name)) for name in ("a", "b", "c")
        ]
        await asyncio.gather(*large, small(database))
    assert decided == ["small", "a", "b", "c"]


async def test_a_small_call_goes_between_the_steps_of_a_large_one():
    seen: list[str] = []

    def noted(name: str):
        def build(draft):
            seen.append(name)
            return pb.CommitResponse()

        return build

    started = asyncio.Event()

    def steps():
        started.set()
        for number in range(4):
            seen.append(f"step {number}")
            yield

    async def small(database):
        await started.wait()
        await database.mutate("r", "small", b"", noted("small"))

    async with gated() as (database, backend, _):
        backend.gate.set()
        large = database.mutate("r", "l", bytes(LARGE_BYTES), noted("large"), prepare=steps())
        await asyncio.gather(large, small(database))
    assert seen.index("small") < seen.index("step 3") < seen.index("large")


async def many_rounds() -> None:
    """As many rounds of the loop as everything needs that waits for nothing else."""
    for _ in range(300):
        await asyncio.sleep(0)


async def test_a_small_write_finds_few_large_ones_before_it():
    decided: list[int] = []

    def noted(number: int):
        def build(draft):
            decided.append(number)
            return pb.CommitResponse()

        return build

    async with gated() as (database, backend, _):
        half = GROUP_BYTES // 2
        calls = [
            asyncio.ensure_future(database.mutate("r", f"{n}", bytes(half), noted(n)))
            for n in range(10)
        ]
        await many_rounds()
        assert decided == [0, 1, 2, 3]  # two groups of the writer
        calls[5].cancel()  # one that waits may go
        backend.gate.set()
        await asyncio.gather(*calls, return_exceptions=True)
    assert decided == [0, 1, 2, 3, 4, 6, 7, 8, 9]


async def test_large_calls_that_wait_are_bounded():
    async with gated(max_queued_bytes=LARGE_BYTES) as (database, backend, _):
        first = asyncio.ensure_future(
            database.mutate("r", "first", bytes(2 * GROUP_BYTES), answer(1))
        )
        await many_rounds()
        waiting = [
            asyncio.ensure_future(database.mutate("r", f"{n}", bytes(LARGE_BYTES), answer(n)))
            for n in range(2)
        ]
        await many_rounds()
        with pytest.raises(DomainError) as caught:
            await database.mutate("r", "more", bytes(LARGE_BYTES), answer(9))
        assert caught.value.reason is ErrorReason.QUEUE_FULL
        backend.gate.set()
        await asyncio.gather(first, *waiting)
        await database.mutate("r", "more", bytes(LARGE_BYTES), answer(9))


async def test_refused_call_leaves_no_trace():
    async with gated() as (database, backend, _):
        backend.gate.set()

        def refuse(draft):
            draft.put(Table.META, b"a", b"1")
            raise DomainError(ErrorReason.NOT_FOUND, "no")

        with pytest.raises(DomainError):
            await database.mutate("r", "id", b"p", refuse)
        await database.mutate("r", "id", b"p", answer(1))
        assert database.get(Table.META, b"a") is None


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a\0b"])
async def test_malformed_request_id_is_refused(request_id):
    async with gated() as (database, _, _):
        with pytest.raises(DomainError, match="request_id"):
            await database.mutate("r", request_id, b"p", answer(1))


async def test_oldest_request_ids_are_forgotten():
    async with gated(max_requests=10) as (database, backend, _):
        backend.gate.set()
        for number in range(30):
            await database.mutate("r", f"id-{number}", b"p", answer(number))
        assert sum(1 for _ in backend.scan(Table.REQUESTS, b"", None)) == 20
        kept = await database.mutate("r", "id-29", b"p", answer(99))
        assert pb.AcquireTermResponse.FromString(kept).term == 29
        forgotten = await database.mutate("r", "id-0", b"p", answer(99))
        assert pb.AcquireTermResponse.FromString(forgotten).term == 99


async def test_failed_write_is_fatal_and_never_acknowledged():
    async with gated() as (database, backend, failures):
        backend.error = OSError("disk")
        waiting = write(database, b"a", b"1")
        await asyncio.sleep(0)
        backend.gate.set()
        with pytest.raises(DomainError) as caught:
            await waiting
        assert caught.value.reason is ErrorReason.UNAVAILABLE
        assert failures == [backend.error]
