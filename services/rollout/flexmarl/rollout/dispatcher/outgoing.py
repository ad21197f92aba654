"""Messages under construction: sent at once when the peer is idle, coalesced while it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)


class Outgoing(Generic[MessageT]):
    """What waits to be sent to one peer.

    `take` waits for something to send (freed by `add`, or by `close`, which ends it with None).
    What can pile up is bounded by the samples in progress.
    """

    def __init__(self, make: Callable[[], MessageT]) -> None:
        self._make = make
        self._message = make()
        self._filled = asyncio.Event()
        self._closed = False

    def add(self) -> MessageT:
        """The message under construction; what is added to it is sent soon."""
        self._filled.set()
        return self._message

    async def take(self) -> MessageT | None:
        """The next message, or None after `close`."""
        await self._filled.wait()
        if self._closed:
            return None
        self._filled.clear()
        full, self._message = self._message, self._make()
        return full

    def close(self) -> None:
        """Ends the sender; what was not taken is dropped."""
        self._closed = True
        self._filled.set()
