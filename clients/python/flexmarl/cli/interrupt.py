"""Ctrl-C: the first one asks for an orderly stop, the second one ends everything now."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

from flexmarl.cli.errors import EXIT_INTERRUPTED

ResultT = TypeVar("ResultT")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """The user asked to stop."""


class InterruptGuard:
    """Catches SIGINT and SIGTERM while it is entered.

    `run` ends with `Interrupted` at the first signal; the caller then stops what it started. A
    second signal calls the hooks and exits the process.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._last_words: list[Callable[[], None]] = []

    def on_second(self, hook: Callable[[], None]) -> None:
        """Call `hook` before the process exits on a second signal."""
        self._last_words.append(hook)

    async def run(self, awaitable: Awaitable[ResultT]) -> ResultT:
        """Wait for the result; a signal cancels it.

        Raises:
            Interrupted: A signal came.
        """
        work = asyncio.ensure_future(awaitable)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise Interrupted
        finally:
            asked.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if not self._asked.is_set():
            self._asked.set()
            return
        for hook in self._last_words:
            hook()
        os._exit(EXIT_INTERRUPTED)
