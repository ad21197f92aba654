"""Owned background tasks and threads, and a coalescer that batches without a timer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from flexmarl.core.call_context import detached_context
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.logging import get_logger

ItemT = TypeVar("ItemT")
ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

_log = get_logger(__name__)


async def in_thread(
    function: Callable[ParamsT, ResultT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
) -> ResultT:
    """`asyncio.to_thread` for work on what the caller holds, such as an open file or a lease.

    A thread cannot be ended. A caller that is cancelled waits for its end here, before it gives
    back what the thread still uses.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # nobody is left to be told
        raise


class Background:
    """Owner of background tasks: none is lost to the garbage collector, none fails in silence.

    Args:
        on_failure: Called with the task's name and error, once per failed task; a service passes
            `server.request_stop`, so that it stops instead of limping on.
    """

    def __init__(self, on_failure: Callable[[str, BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine under a name until it ends or the owner closes.

        It keeps the caller's log ids, not the caller's deadline.
        """
        if self._closed:
            coroutine.close()
            raise RuntimeError(f"background task {name!r} started after close")
        task = asyncio.get_running_loop().create_task(
            coroutine, name=name, context=detached_context()
        )
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """Cancel what runs and wait for its end; a task that resists is named in the log."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=timeout_s)
            for task in pending:
                _log.error("background_task_resists_cancel", task=task.get_name())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            _log.error("background_task_failed", task=task.get_name(), exc_info=error)
            self._on_failure(task.get_name(), error)


class Coalescer(Generic[ItemT, ResultT]):
    """Batches without a timer: sends at once when idle, coalesces while batches are in flight.

    `put` waits while the queue is full (freed by a batch being cut) and `submit` also waits for the
    item's result (freed by the sink). A failed sink fails the items of its batch, nothing else.

    Args:
        sink: Takes a batch and returns one result per item, in order.
        name: Named in errors.
        max_batch_items: Most items per batch.
        max_batch_bytes: Most bytes per batch; a larger single item goes alone.
        max_queued_items: Bound of the queue.
        max_queued_bytes: Bound of the queue; a larger single item waits for an empty queue.
        max_in_flight: Most batches in flight.
        put_timeout_s: Longest wait for room; then QUEUE_FULL.
    """

    def __init__(
        self,
        sink: Callable[[list[ItemT]], Awaitable[Sequence[ResultT]]],
        *,
        name: str,
        max_batch_items: int = 256,
        max_batch_bytes: int = 4 << 20,
        max_queued_items: int = 4096,
        max_queued_bytes: int = 64 << 20,
        max_in_flight: int = 1,
        put_timeout_s: float = 30.0,
    ) -> None:
        self._sink = sink
        self._name = name
        self._max_batch_items = max_batch_items
        self._max_batch_bytes = max_batch_bytes
        self._max_queued_items = max_queued_items
        self._max_queued_bytes = max_queued_bytes
        self._max_in_flight = max_in_flight
        self._put_timeout_s = put_timeout_s
        self._queue: deque[tuple[ItemT, int, asyncio.Future[ResultT]]] = deque()
        self._queued_bytes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._sending: set[asyncio.Task[None]] = set()
        self._pump_due = False
        self._closed = False

    @property
    def queued(self) -> int:
        """Items waiting for a batch."""
        return len(self._queue)

    async def put(self, item: ItemT, *, size_bytes: int = 0) -> asyncio.Future[ResultT]:
        """Enqueue an item; returns the future of its result once there was room.

        Raises:
            DomainError: QUEUE_FULL after `put_timeout_s`; CANCELLED when closed.
        """
        # Who comes later must not overtake who waits, or a large item starves.
        if self._waiting or not self._has_room(size_bytes):
            await self._wait_for_room(size_bytes)
        if self._closed:
            raise DomainError(ErrorReason.CANCELLED, f"{self._name} is closed")
        loop = asyncio.get_running_loop()
        result: asyncio.Future[ResultT] = loop.create_future()
        self._queue.append((item, size_bytes, result))
        self._queued_bytes += size_bytes
        if not self._pump_due:
            # Not now: items that other tasks put in this turn of the loop join the same batch.
            self._pump_due = True
            loop.call_soon(self._pump)
        return result

    async def submit(self, item: ItemT, *, size_bytes: int = 0) -> ResultT:
        """Enqueue an item and wait for its result."""
        return await (await self.put(item, size_bytes=size_bytes))

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """Send what is queued, wait for it, and refuse what comes later."""
        self._closed = True
        self._wake()
        try:
            async with asyncio.timeout(timeout_s):
                while self._queue or self._sending:
                    self._pump()
                    await asyncio.wait(self._sending)
        except TimeoutError:
            for _, _, result in self._queue:
                result.cancel()
            self._queue.clear()
            for task in self._sending:
                task.cancel()
            _log.error("coalescer_closed_with_items_in_flight", name=self._name)

    def _has_room(self, size_bytes: int) -> bool:
        if not self._queue:
            return True
        return (
            len(self._queue) < self._max_queued_items
            and self._queued_bytes + size_bytes <= self._max_queued_bytes
        )

    async def _wait_for_room(self, size_bytes: int) -> None:
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(room)
        try:
            async with asyncio.timeout(self._put_timeout_s):
                await room
                while not (self._has_room(size_bytes) or self._closed):
                    room = asyncio.get_running_loop().create_future()
                    self._waiting.appendleft(room)
                    await room
        except TimeoutError:
            raise DomainError(
                ErrorReason.QUEUE_FULL,
                f"{self._name}: no room for {self._put_timeout_s:g} s",
                {"queue": self._name, "items": str(len(self._queue))},
            ) from None
        finally:
            if room in self._waiting:
                self._waiting.remove(room)
            self._wake()  # the next one in line, whether this one got in or gave up

    def _wake(self) -> None:
        if self._closed:
            while self._waiting:
                _resolve(self._waiting.popleft())
        elif self._waiting and self._has_room(0):
            _resolve(self._waiting.popleft())

    def _pump(self) -> None:
        self._pump_due = False
        while self._queue and len(self._sending) < self._max_in_flight:
            # A batch belongs to many callers: neither the ids nor the deadline of one are its own.
            task = asyncio.get_running_loop().create_task(
                self._send(self._cut()), name=f"{self._name} batch", context=Context()
            )
            self._sending.add(task)
            task.add_done_callback(self._sent)
        self._wake()

    def _cut(self) -> list[tuple[ItemT, asyncio.Future[ResultT]]]:
        batch: list[tuple[ItemT, asyncio.Future[ResultT]]] = []
        batch_bytes = 0
        while self._queue and len(batch) < self._max_batch_items:
            item, size_bytes, result = self._queue[0]
            if batch and batch_bytes + size_bytes > self._max_batch_bytes:
                break
            self._queue.popleft()
            self._queued_bytes -= size_bytes
            batch_bytes += size_bytes
            batch.append((item, result))
        return batch

    async def _send(self, batch: list[tuple[ItemT, asyncio.Future[ResultT]]]) -> None:
        try:
            results = await self._sink([item for item, _ in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{self._name}: {len(batch)} items, {len(results)} results")
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for the items
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._pump()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
