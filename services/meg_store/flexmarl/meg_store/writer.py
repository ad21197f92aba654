"""The one thread that writes: group commit without a timer.

It takes whatever is queued (a group of at most about 1 MiB, so that single writes never wait behind
a bulk), writes it unsynced, flushes the write-ahead log once if anything in the group asks for it,
and only then acknowledges. Groups keep the order of submission. A write or flush that fails is
fatal: the rows of the group are visible already, so the process must not go on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from flexmarl.meg_store.backend import Backend, Batch

GROUP_BYTES = 1 << 20


@dataclass(slots=True)
class Job:
    """One batch to write.

    Attributes:
        batch: What to write.
        needs_sync: It must survive power loss before it is acknowledged.
        acknowledge: Called on the event loop once it is written (and synced).
        fail: Called on the event loop when the writer died before.
    """

    batch: Batch
    needs_sync: bool
    acknowledge: Callable[[], None]
    fail: Callable[[BaseException], None]


class Writer:
    """Owns the writing side of a backend. It waits for jobs; freed by `submit` and `close`.

    Args:
        backend: Written from this thread alone.
        loop: Where acknowledgements run.
        on_fatal: Called on the loop after a failed write; it must end the process.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        loop: asyncio.AbstractEventLoop,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._backend = backend
        self._loop = loop
        self._on_fatal = on_fatal
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store writer", daemon=True)
        self.num_groups = 0
        self.num_syncs = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; the caller bounds the queue."""
        self._queue.put(job)

    def close(self) -> None:
        """Write what is queued and end the thread; blocks until then."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        open_ = True
        while open_:
            group, open_ = self._take()
            if not group:
                continue
            try:
                self._backend.write([job.batch for job in group])
                if any(job.needs_sync for job in group):
                    self._backend.flush()
                    self.num_syncs += 1
            except BaseException as error:  # noqa: BLE001 - handed to the loop, which ends the process
                self._loop.call_soon_threadsafe(self._die, group, error)
                return
            self.num_groups += 1
            self._loop.call_soon_threadsafe(_acknowledge, group)
            del group  # its rows are freed when it is acknowledged, not when the next one comes

    def _take(self) -> tuple[list[Job], bool]:
        job = self._queue.get()
        group: list[Job] = []
        size_bytes = 0
        while job is not None:
            group.append(job)
            size_bytes += job.batch.size_bytes
            if size_bytes >= GROUP_BYTES:
                return group, True
            try:
                job = self._queue.get_nowait()
            except Empty:
                return group, True
        return group, False

    def _die(self, group: list[Job], error: BaseException) -> None:
        for job in group:
            job.fail(error)
        self._on_fatal(error)


def _acknowledge(group: list[Job]) -> None:
    for job in group:
        job.acknowledge()
