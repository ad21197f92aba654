"""Messages under construction: sent at once when the peer is idle, coalesced while it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message

from flexmarl.core.errors import DomainError
from flexmarl.rollout.pieces import frames_of
from flexmarl.runtime.children import ChildProcess
from flexmarl.runtime.logging import get_logger

MessageT = TypeVar("MessageT", bound=Message)

LATER_S: Final = 0.05
"""Longest that something waits for which nobody waits."""

_log = get_logger(__name__)


class Outgoing(Generic[MessageT]):
    """What waits to be sent to one peer.

    `take` waits for something to send (freed by `add`, by `close`, which ends it with None, or when
    what was added for later is due). What can pile up is bounded by the samples in progress.
    """

    def __init__(self, make: Callable[[], MessageT]) -> None:
        self._make = make
        self._message = make()
        self._filled = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._closed = False

    def add(self) -> MessageT:
        """The message under construction; what is added to it is sent soon."""
        self._filled.set()
        return self._message

    def add_for_later(self) -> MessageT:
        """The same for what nobody waits for: it goes with the next message, at latest in LATER_S.

        A message of its own would wake the peer, which costs more than what it says is worth.
        """
        if self._later is None and not self._filled.is_set():
            self._later = asyncio.get_running_loop().call_later(LATER_S, self._filled.set)
        return self._message

    async def take(self) -> MessageT | None:
        """The next message, or None after `close`."""
        await self._filled.wait()
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._closed:
            return None
        self._filled.clear()
        full, self._message = self._message, self._make()
        return full

    def close(self) -> None:
        """Ends the sender; what was not taken is dropped."""
        self._closed = True
        self._filled.set()


async def send_to_child(outgoing: Outgoing[MessageT], child: ChildProcess) -> None:
    """Sends a child what is added for it, until `close` or the end of its link."""
    while (message := await outgoing.take()) is not None:
        try:
            for frame in frames_of(message):
                await child.link.send(frame)
        except DomainError as error:
            # Where the link has ended the reader sees it, too. One that does not take what it is
            # sent would wait for ever.
            _log.warning("child_cannot_be_told", child=child.name, error=str(error))
            child.kill()
            return
