"""The event log of each run: written with the rows, read by cursor.

Watchers pull: each keeps its cursor and reads what is published, from memory while it is recent and
from the table otherwise, so a slow watcher costs the store no memory. An event is published once
the write it belongs to is acknowledged, so a watcher never sees what a crash could take back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import Backend, Batch, Table

_TAIL_EVENTS = 4096
_TAIL_BYTES = 16 << 20
_PAGE_EVENTS = 256
_PAGE_BYTES = 1 << 20
_TRIM_EVERY = 1024


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One event as it is stored: serialised, its kind beside so that filters decode nothing."""

    cursor: int
    kind: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """Events to deliver (serialised `Event`s) and where to go on after them."""

    events: list[bytes]
    cursor: int


class RunLog:
    """Event log of one run."""

    def __init__(self, run_id: str, backend: Backend, *, max_events: int) -> None:
        self._run_id = run_id
        self._backend = backend
        self._max_events = max_events
        self._prefix = keys.prefix(run_id)
        self._end = keys.after(self._prefix)
        self._tail: deque[StoredEvent] = deque()
        self._tail_bytes = 0
        self._changed = asyncio.Event()
        first = next(backend.scan(Table.EVENTS, self._prefix, self._end), None)
        last = next(backend.scan(Table.EVENTS, self._prefix, self._end, reverse=True), None)
        self.published = 0 if last is None else keys.number_of(last[0])
        self._staged = self.published
        self._first = self.published + 1 if first is None else keys.number_of(first[0])

    def stage(self, batch: Batch, event: pb.Event) -> StoredEvent:
        """Give the event its cursor and put it into the batch."""
        self._staged += 1
        event.cursor = self._staged
        stored = StoredEvent(self._staged, event.kind, event.SerializeToString())
        key = keys.numbered(stored.cursor, self._run_id)
        batch.put(Table.EVENTS, key, bytes((stored.kind,)) + stored.data)
        excess = self._staged - self._first + 1 - self._max_events
        if excess >= _TRIM_EVERY:
            self._trim(batch, self._first + excess)
        return stored

    def publish(self, event: StoredEvent) -> None:
        """Let watchers see an acknowledged event; events come in order."""
        self._tail.append(event)
        self._tail_bytes += len(event.data)
        while len(self._tail) > _TAIL_EVENTS or self._tail_bytes > _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft().data)
        self.published = event.cursor
        self._wake()

    def check_cursor(self, cursor: int) -> None:
        """Refuse a cursor whose following events are not kept, or that was never given out.

        Raises:
            DomainError: CURSOR_OUT_OF_RANGE.
        """
        if cursor != 0 and not self._first - 1 <= cursor <= self.published:
            raise DomainError(
                ErrorReason.CURSOR_OUT_OF_RANGE,
                f"run {self._run_id!r}: cursor {cursor} is outside of "
                f"{self._first - 1}..{self.published}",
                {"restart": str(self._first - 1), "last": str(self.published)},
            )

    def read(self, cursor: int, kinds: Collection[int]) -> Page:
        """Next published events of some kinds (none named: all) after a cursor; 0: the oldest."""
        found: list[bytes] = []
        size_bytes = 0
        if cursor == 0:
            cursor = self._first - 1
        for event in self._after(cursor):
            if event.cursor > self.published:
                break
            cursor = event.cursor
            if kinds and event.kind not in kinds:
                continue
            found.append(event.data)
            size_bytes += len(event.data)
            if len(found) >= _PAGE_EVENTS or size_bytes >= _PAGE_BYTES:
                break
        return Page(found, cursor)

    async def wait(self, cursor: int, *, timeout_s: float) -> None:
        """Wait until an event after the cursor is published, or the time is up."""
        if self.published > cursor:
            return
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        if not self._changed.is_set():
            self._changed.set()
            self._changed = asyncio.Event()

    def _after(self, cursor: int) -> list[StoredEvent]:
        if self._tail and cursor + 1 >= self._tail[0].cursor:
            skipped = cursor + 1 - self._tail[0].cursor
            end = min(skipped + 4 * _PAGE_EVENTS, len(self._tail))
            return [self._tail[i] for i in range(skipped, end)]
        start = keys.numbered(cursor + 1, self._run_id)
        events: list[StoredEvent] = []
        size_bytes = 0
        for key, value in self._backend.scan(Table.EVENTS, start, self._end):
            events.append(StoredEvent(keys.number_of(key), value[0], value[1:]))
            size_bytes += len(value)
            if len(events) >= 4 * _PAGE_EVENTS or size_bytes >= _PAGE_BYTES:
                break
        return events

    def _trim(self, batch: Batch, first: int) -> None:
        old = keys.numbered(0, self._run_id)
        batch.deleted_ranges.append((Table.EVENTS, old, keys.numbered(first, self._run_id)))
        self._first = first


class EventLogs:
    """The logs of all runs, opened on first use."""

    def __init__(self, backend: Backend, *, max_events: int) -> None:
        self._backend = backend
        self._max_events = max_events
        self._logs: dict[str, RunLog] = {}
        self.closed = False

    def of(self, run_id: str) -> RunLog:
        """The log of a run."""
        log = self._logs.get(run_id)
        if log is None:
            log = RunLog(run_id, self._backend, max_events=self._max_events)
            self._logs[run_id] = log
        return log

    def forget(self, run_id: str) -> None:
        """Drop the log of a deleted run; its watchers wake and find the run gone."""
        log = self._logs.pop(run_id, None)
        if log is not None:
            log._wake()

    def close(self) -> None:
        """Wake all watchers; they end when they see `closed`."""
        self.closed = True
        for log in self._logs.values():
            log._wake()
