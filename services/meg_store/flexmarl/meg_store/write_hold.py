"""A moment without mutations, so that the snapshots of several shards fit together.

    hold on every shard -> all are held: one moment -> each copies its tables and goes on

A mutation on one shard often follows one on another: a mark follows its record. What is copied
while all are held has both of them, or the first alone, never the second alone.
"""

from __future__ import annotations

import asyncio
from typing import Final

from flexmarl.core.errors import DomainError, ErrorReason

MAX_HOLD_S: Final = 5.0
"""A hold that nobody gives back ends after this, below the deadline of every mutation."""


class WriteHold:
    """Keeps the mutations of a shard waiting.

    Args:
        max_waiting_bytes: Requests that wait beyond this are refused with QUEUE_FULL.
    """

    def __init__(self, *, max_waiting_bytes: int) -> None:
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._hold_id = ""
        self._ended = asyncio.Event()
        self._ended.set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_held(self) -> bool:
        """Whether mutations have to wait."""
        return bool(self._hold_id)

    def begin(self, hold_id: str) -> None:
        """Hold mutations until `end`, or for `MAX_HOLD_S`.

        Raises:
            DomainError: STATE_TRANSITION_REFUSED while another one is held.
            ValueError: The id is empty.
        """
        if not hold_id:
            raise ValueError("hold_id: give one, the same for all shards")
        if self.is_held:
            raise DomainError(
                ErrorReason.STATE_TRANSITION_REFUSED,
                "another snapshot over several shards is being made; wait for it",
            )
        self._hold_id = hold_id
        self._ended.clear()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(MAX_HOLD_S, self.end, hold_id)

    def end(self, hold_id: str) -> bool:
        """Let mutations go on; returns whether they were held until now under this id."""
        if not hold_id or hold_id != self._hold_id:
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._hold_id, self._timer = "", None
        self._ended.set()
        return True

    def close(self) -> None:
        """Let everything go on: the store stops."""
        self.end(self._hold_id)

    async def ended(self) -> None:
        """Wait for the end of the hold; freed by `end`, after `MAX_HOLD_S` at the latest."""
        await self._ended.wait()

    async def passed(self, size_bytes: int) -> None:
        """Let a mutation wait as long as others are held; freed as `ended` is.

        Raises:
            DomainError: QUEUE_FULL.
        """
        while self.is_held:
            if self._waiting_bytes + size_bytes > self._max_waiting_bytes:
                raise DomainError(
                    ErrorReason.QUEUE_FULL,
                    f"{self._waiting_bytes} bytes wait until a snapshot's tables are copied",
                    {"waiting_bytes": str(self._waiting_bytes)},
                )
            self._waiting_bytes += size_bytes
            try:
                await self._ended.wait()
            finally:
                self._waiting_bytes -= size_bytes
