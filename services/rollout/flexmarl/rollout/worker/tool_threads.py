"""Threads for tools that are not async, beside the event loop.

A thread cannot be ended: a tool that hangs keeps its thread after its time is up. Such threads are
counted; when there are too many the worker is ended by its watchdog's exit, which names the tool,
and its samples go on in a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

MAX_RUNNING: Final = 16
"""Tools that run at once; further ones wait, within their own timeouts."""

MAX_HANGING: Final = 64
"""Threads whose tools nobody waits for any more before the worker is ended."""


class ToolThreads:
    """Runs functions in threads.

    `run` waits for a free thread (freed by the end of another tool, or by its timeout), then for
    the function (freed by its end; at latest by the caller's timeout).

    Attributes:
        num_hanging: Threads whose tools nobody waits for any more.

    Args:
        on_hanging: Told the sample and what hangs, when too many threads do.
    """

    def __init__(self, on_hanging: Callable[[str, str], None]) -> None:
        self._on_hanging = on_hanging
        self._executor = ThreadPoolExecutor(MAX_RUNNING + MAX_HANGING, thread_name_prefix="tool")
        self._free = asyncio.Semaphore(MAX_RUNNING)
        self.num_hanging = 0
        self._loop = asyncio.get_running_loop()

    async def run(self, function: Callable[[], Any], *, sample_id: str, what: str) -> Any:  # noqa: ANN401
        """What the function returns or raises."""
        async with self._free:
            future = self._executor.submit(function)
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                if not future.cancel() and not future.done():
                    self._abandon(future, sample_id, what)
                raise

    def _abandon(self, future: Future[Any], sample_id: str, what: str) -> None:
        self.num_hanging += 1
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._ended))
        if self.num_hanging >= MAX_HANGING:
            self._on_hanging(sample_id, f"{what} keeps {self.num_hanging} threads that never end")

    def _ended(self) -> None:
        self.num_hanging -= 1
