"""Large calls come one after the other, and few at a time, so that small ones wait for little.

A large call is prepared in steps, with small calls in between, and only once few bytes of those
before it are still to be written: a small write finds about two groups of the writer before it,
however much clients have sent. Two keep the disk busy: one is decided while the other is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.writer import GROUP_BYTES

LARGE_BYTES: Final = 64 << 10
"""From here on a mutation is large: deciding over it holds the loop for milliseconds."""

_UNDONE_BYTES: Final = 2 * GROUP_BYTES

_ROUNDS: Final = 4
"""Rounds of the loop that a call needs from its arrival to its decision, and some."""


class LargeCalls:
    """Admits large calls in the order of their arrival.

    Args:
        max_waiting_bytes: While more than this wait, further ones are refused with QUEUE_FULL.
    """

    def __init__(self, *, max_waiting_bytes: int) -> None:
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._undone_bytes = 0
        self._turn = asyncio.Lock()
        self._fewer = asyncio.Event()

    @asynccontextmanager
    async def turn(self, size_bytes: int, steps: Iterable[None]) -> AsyncIterator[None]:
        """The turn of one call: it is prepared when the block begins, and written when it ends.

        Waits for the calls before it; freed as they are written, bounded by the caller's deadline.

        Raises:
            DomainError: QUEUE_FULL.
        """
        if self._waiting_bytes > self._max_waiting_bytes:
            raise DomainError(
                ErrorReason.QUEUE_FULL,
                f"{self._waiting_bytes} bytes wait until those before them are written",
                {"waiting_bytes": str(self._waiting_bytes)},
            )
        self._waiting_bytes += size_bytes
        try:
            async with self._turn:
                while self._undone_bytes >= _UNDONE_BYTES:
                    self._fewer.clear()
                    await self._fewer.wait()
                for _ in range(_ROUNDS):
                    await asyncio.sleep(0)
                for _ in steps:
                    await asyncio.sleep(0)
        finally:
            self._waiting_bytes -= size_bytes
        self._undone_bytes += size_bytes
        try:
            yield
        finally:
            self._undone_bytes -= size_bytes
            self._fewer.set()
