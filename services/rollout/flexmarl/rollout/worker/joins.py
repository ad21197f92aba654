"""Joins: waiting for all, for the first, or for each of several calls.

Calls start when the join is made, in the order given, so that their paths are the same in every
repetition. Where several end in the same turn of the loop (in a repeated run all stored ones do),
they count in the order in which they finished first, not in the order given.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import Generic, TypeVar

from flexmarl.rollout.worker.calls import outputs_in

T = TypeVar("T")


async def all_of(tasks: Sequence[asyncio.Future[T]]) -> list[T]:
    """Results in the order of the calls; the first failure cancels the rest and is raised."""
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and _failed(task)]
        return [task.result() for task in (failed or tasks)]
    finally:
        await cut(tasks)


async def any_of(tasks: Sequence[asyncio.Future[T]]) -> T:
    """The first success; the rest is cancelled. When none succeeds, the first call's failure."""
    try:
        pending: set[asyncio.Future[T]] = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            successes = [task for task in done if not _failed(task)]
            if successes:
                return _in_order(successes, tasks)[0].result()
        return tasks[0].result()
    finally:
        await cut(tasks)


class Each(Generic[T]):
    """Results as they come; a failure is raised in its turn, and cancels the rest.

    `break` leaves the rest running until the workflow ends; `cancel` ends it at once.
    """

    def __init__(self, tasks: Sequence[asyncio.Future[T]]) -> None:
        self._tasks = tasks
        self._pending: set[asyncio.Future[T]] = set(tasks)
        self._ready: list[asyncio.Future[T]] = []

    def __aiter__(self) -> AsyncIterator[T]:
        """Itself: each result is given out once."""
        return self

    async def __anext__(self) -> T:
        """The next result."""
        if not self._ready:
            if not self._pending:
                raise StopAsyncIteration
            done, self._pending = await asyncio.wait(
                self._pending, return_when=asyncio.FIRST_COMPLETED
            )
            self._ready = _in_order(done, self._tasks)
        task = self._ready.pop(0)
        if _failed(task):
            await self.cancel()
        return task.result()

    async def cancel(self) -> None:
        """Cancels what has not ended."""
        await cut(self._tasks)
        self._pending.clear()
        self._ready.clear()


def started(calls: Iterable[Awaitable[T]]) -> list[asyncio.Future[T]]:
    """Starts the calls."""
    return [asyncio.ensure_future(call) for call in calls]


async def cut(tasks: Iterable[asyncio.Future[T]]) -> None:
    """Cancels what has not ended, and waits until it has."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


def _failed(task: asyncio.Future[T]) -> bool:
    return task.cancelled() or task.exception() is not None


def _in_order(
    done: Iterable[asyncio.Future[T]], tasks: Sequence[asyncio.Future[T]]
) -> list[asyncio.Future[T]]:
    """By the time at which the results finished; what says no time keeps the order given."""
    place = {id(task): number for number, task in enumerate(tasks)}
    return sorted(done, key=lambda task: (_finished_unix_ns(task), place[id(task)]))


def _finished_unix_ns(task: asyncio.Future[T]) -> int:
    if _failed(task):
        return 0
    return max((output.finished_unix_ns for output in outputs_in(task.result())), default=0)
