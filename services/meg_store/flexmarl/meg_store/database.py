"""State of the store as decisions see it: what is written, and what is on its way.

All decisions run on the event loop. A `Draft` reads its own writes, then writes that are queued but
not applied yet, then the backend; building a draft never awaits, so decisions are serialised by the
loop itself. Large calls take turns (large_calls.py). `commit` queues the draft for the writer
thread and returns once it is acknowledged. Readers outside of drafts see the backend: what is
acknowledged, and what the writer is flushing at that moment. The log is flushed in order, so
whatever is decided on the latter is never durable before it; a flush that fails ends the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from google.protobuf.message import Message

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import TABLES, Backend, Batch, Table
from flexmarl.meg_store.event_log import EventLogs
from flexmarl.meg_store.large_calls import LARGE_BYTES, LargeCalls
from flexmarl.meg_store.write_hold import WriteHold
from flexmarl.meg_store.writer import Job, Writer

_HASH_BYTES = 16
_BY_CRC = b"\0\0\0\0"
_SIZE_AND_CRC = struct.Struct(">QI")
_MAX_REQUEST_ID = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseConfig:
    """Bounds of the database.

    Attributes:
        always_sync: Every write is synced (durability `fsync`), not only those that ask for it.
        max_queued_bytes: Beyond this, mutations are refused with QUEUE_FULL.
        max_events: Kept events per run.
        max_requests: Kept request ids per run.
    """

    always_sync: bool = True
    max_queued_bytes: int = 64 << 20
    max_events: int = 1_000_000
    max_requests: int = 100_000


class Draft:
    """One mutation under construction."""

    __slots__ = ("_database", "after_ack", "at_commit", "batch", "events")

    def __init__(self, database: Database) -> None:
        self._database = database
        self.batch = Batch()
        self.events: list[tuple[str, pb.Event]] = []
        self.at_commit: list[Callable[[], None]] = []
        """Changes of state in memory, applied when the draft can no longer fail.

        None of them may hold the draft: a call's rows would stay until the next full collection.
        """
        self.after_ack: list[Callable[[], None]] = []
        """What must wait until the draft is durable."""

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Value as it will be once everything queued is applied."""
        own = self.batch.writes[table]
        if key in own:
            return own[key]
        return self._database.staged(table, key)

    def get_many(self, table: Table, names: Sequence[bytes]) -> list[bytes | None]:
        """Values as they will be once everything queued is applied, in order."""
        own = self.batch.writes[table]
        if not own:
            return self._database.staged_many(table, names)
        asked = [name for name in names if name not in own]
        found = dict(zip(asked, self._database.staged_many(table, asked), strict=True))
        return [own[name] if name in own else found[name] for name in names]

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Set a value."""
        self.batch.put(table, key, value)

    def put_many(self, table: Table, values: Mapping[bytes, bytes]) -> None:
        """Set many values."""
        self.batch.put_many(table, values)

    def delete(self, table: Table, key: bytes) -> None:
        """Delete a key."""
        self.batch.put(table, key, None)

    def delete_range(self, table: Table, start: bytes, end: bytes) -> None:
        """Delete start <= key < end; only for keys that no decision reads."""
        self.batch.deleted_ranges.append((table, start, end))

    def event(self, run_id: str, event: pb.Event) -> None:
        """Log an event with this write."""
        self.events.append((run_id, event))


class Database:
    """Backend, writer and pending writes; see the module's text.

    Args:
        backend: Open backend; closed by `close`.
        config: Bounds.
        on_fatal: Ends the process; called when a write failed.
        check_room: Raises DISK_FULL while nothing more may be written.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        config: DatabaseConfig,
        on_fatal: Callable[[BaseException], None],
        check_room: Callable[[], None] = lambda: None,
    ) -> None:
        self.backend = backend
        self.events = EventLogs(backend, max_events=config.max_events)
        self._config = config
        self._check_room = check_room
        self._pending: list[dict[bytes, Batch]] = [{} for _ in TABLES]  # the last batch with a key
        self._sequences: dict[str, int] = {}
        self._large = LargeCalls(max_waiting_bytes=config.max_queued_bytes)
        self.queued_bytes = 0
        self.hold = WriteHold(max_waiting_bytes=config.max_queued_bytes)
        self.writer = Writer(backend, loop=asyncio.get_running_loop(), on_fatal=on_fatal)
        self.writer.start()

    async def close(self) -> None:
        """End watches, write what is queued, release the backend."""
        self.events.close()
        await asyncio.to_thread(self.writer.close)
        await asyncio.sleep(0)  # the last acknowledgements
        self.backend.close()

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Applied value."""
        return self.backend.get(table, key)

    def scan(self, table: Table, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Applied pairs with a prefix."""
        return self.backend.scan(table, prefix, keys.after(prefix))

    def staged(self, table: Table, key: bytes) -> bytes | None:
        """Value as it will be once everything queued is applied."""
        batch = self._pending[table].get(key)
        return self.backend.get(table, key) if batch is None else batch.writes[table][key]

    def staged_many(self, table: Table, names: Sequence[bytes]) -> list[bytes | None]:
        """Values as they will be once everything queued is applied, in order."""
        pending = self._pending[table]
        asked = [name for name in names if name not in pending]
        found = self.backend.get_many(table, asked)
        if len(asked) == len(names):
            return found
        applied = iter(found)
        return [
            pending[name].writes[table][name] if name in pending else next(applied)
            for name in names
        ]

    async def compact(self, ranges: Iterable[tuple[Table, bytes | None, bytes | None]]) -> None:
        """Give the space of deleted ranges back, off the event loop."""
        for table, start, end in ranges:
            await asyncio.to_thread(self.backend.compact, table, start, end)

    def forget(self, run_id: str) -> None:
        """Drop what is remembered of a deleted run; its watches end."""
        self._sequences.pop(run_id, None)
        self.events.forget(run_id)

    def begin(self, *, essential: bool = False) -> Draft:
        """Start a mutation.

        Args:
            essential: It gives space back, or the store itself depends on it: never refused.

        Raises:
            DomainError: QUEUE_FULL, DISK_FULL.
        """
        if essential:
            return Draft(self)
        self._check_room()
        if self.queued_bytes > self._config.max_queued_bytes:
            raise DomainError(
                ErrorReason.QUEUE_FULL,
                f"{self.queued_bytes} bytes wait to be written",
                {"queued_bytes": str(self.queued_bytes)},
            )
        return Draft(self)

    async def commit(self, draft: Draft, *, sync: bool = False, lazy: bool = False) -> None:
        """Write a draft and wait until it is as durable as asked.

        Args:
            draft: What to write.
            sync: It must survive power loss, whatever is configured.
            lazy: It need not: a later write that matters will sync it.
        """
        await self.enqueue(draft, sync=sync, lazy=lazy)

    def enqueue(
        self, draft: Draft, *, sync: bool = False, lazy: bool = False
    ) -> asyncio.Future[None]:
        """Queue a draft; the future ends with its acknowledgement. See `commit`."""
        batch = draft.batch
        staged = [
            (log := self.events.of(run_id), log.stage(batch, event))
            for run_id, event in draft.events
        ]
        for change in draft.at_commit:
            change()
        for table in TABLES:
            self._pending[table].update(dict.fromkeys(batch.writes[table], batch))
        size_bytes = batch.size_bytes
        self.queued_bytes += size_bytes
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def acknowledge() -> None:
            self.queued_bytes -= size_bytes
            self._applied(batch)
            for callback in draft.after_ack:
                callback()
            for log, event in staged:
                log.publish(event)
            if not done.done():
                done.set_result(None)

        def fail(error: BaseException) -> None:
            if not done.done():
                done.set_exception(
                    DomainError(ErrorReason.UNAVAILABLE, "the store failed to write and stops")
                )
                done.exception()

        needs_sync = sync or (self._config.always_sync and not lazy)
        self.writer.submit(Job(batch, needs_sync, acknowledge, fail))
        return done

    async def mutate(
        self,
        run_id: str,
        request_id: str,
        payload: bytes,
        build: Callable[[Draft], Message],
        *,
        prepare: Iterable[None] = (),
        sync: bool = False,
        lazy: bool = False,
        essential: bool = False,
    ) -> bytes:
        """Run a mutation once per request id.

        Args:
            run_id: Scope of the request id.
            request_id: Id of the logical call.
            payload: The request as it came.
            build: Decides and fills the draft; raises to refuse. It must not await.
            prepare: Steps of a large call's preparation, with small calls in between; what they
                leave undone, and a small call's own, is done by `build`.
            sync: See `commit`.
            lazy: See `commit`.
            essential: See `begin`.

        Returns:
            The serialised response, the same for a repeated call.

        Raises:
            DomainError: REQUEST_ID_REUSED, INVALID_ARGUMENT, QUEUE_FULL, DISK_FULL, or what
                `build` raises.
        """
        if not request_id or len(request_id) > _MAX_REQUEST_ID or "\0" in request_id:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"request_id: give one of 1 to {_MAX_REQUEST_ID} characters",
            )
        durably = {"sync": sync, "lazy": lazy}
        if len(payload) < LARGE_BYTES:
            return await self._decide(run_id, request_id, payload, build, durably, essential)
        async with self._large.turn(len(payload), prepare):
            return await self._decide(run_id, request_id, payload, build, durably, essential)

    async def _decide(
        self,
        run_id: str,
        request_id: str,
        payload: bytes,
        build: Callable[[Draft], Message],
        durably: Mapping[str, bool],
        essential: bool,
    ) -> bytes:
        if self.hold.is_held:
            await self.hold.passed(len(payload))
        draft = self.begin(essential=essential)
        digest = _digest(payload)
        key = keys.join("id", run_id, request_id)
        answered = draft.get(Table.REQUESTS, key)
        if answered is not None:
            response = _answer(answered, digest, payload, request_id)
            if key in self._pending[Table.REQUESTS]:
                await self.commit(draft, **durably)  # queued behind the first call's write
            return response
        response = build(draft).SerializeToString()
        self._remember(draft, run_id, request_id, digest + response)
        await self.commit(draft, **durably)
        return response

    def _remember(self, draft: Draft, run_id: str, request_id: str, answer: bytes) -> None:
        number = self._next_sequence(run_id)
        draft.put(Table.REQUESTS, keys.join("id", run_id, request_id), answer)
        draft.put(Table.REQUESTS, keys.numbered(number, "order", run_id), request_id.encode())
        if number > self._config.max_requests:
            old = keys.numbered(number - self._config.max_requests, "order", run_id)
            old_id = draft.get(Table.REQUESTS, old)
            if old_id is not None:
                draft.delete(Table.REQUESTS, old)
                draft.delete(Table.REQUESTS, keys.join("id", run_id, old_id.decode()))

    def _next_sequence(self, run_id: str) -> int:
        if run_id not in self._sequences:
            prefix = keys.prefix("order", run_id)
            end = keys.after(prefix)
            last = next(self.backend.scan(Table.REQUESTS, prefix, end, reverse=True), None)
            self._sequences[run_id] = 0 if last is None else keys.number_of(last[0])
        self._sequences[run_id] += 1
        return self._sequences[run_id]

    def _applied(self, batch: Batch) -> None:
        for table in TABLES:
            pending = self._pending[table]
            for key in batch.writes[table]:
                if pending[key] is batch:
                    del pending[key]


def _digest(payload: bytes) -> bytes:
    """What tells a repeated call from another one under its id, by mistake.

    A large call's bytes are checked by size and CRC: a cryptographic hash took a tenth of its time.
    """
    if len(payload) < LARGE_BYTES:
        return _hash(payload)
    return _BY_CRC + _SIZE_AND_CRC.pack(len(payload), crc32(payload))


def _hash(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()[:_HASH_BYTES]


def _answer(answered: bytes, digest: bytes, payload: bytes, request_id: str) -> bytes:
    known = answered[:_HASH_BYTES]
    if not known.startswith(_BY_CRC):  # of a small call, or as all calls once were
        digest = _hash(payload)
    if known != digest:
        raise DomainError(
            ErrorReason.REQUEST_ID_REUSED,
            f"request id {request_id!r} was used by another call",
            {"request_id": request_id},
        )
    return answered[_HASH_BYTES:]
