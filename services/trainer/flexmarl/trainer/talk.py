"""How two trainers talk over a stream: each says something now and then, or is given up."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Generic, TypeVar

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError, ErrorReason

SaidT = TypeVar("SaidT")

_BEATS_PER_SILENCE: Final = 4

FRAME_FORMAT: Final = hashlib.sha256(rank_pb2.DESCRIPTOR.serialized_pb).hexdigest()
"""Both ends must agree on what commands to ranks and their replies look like."""


class Outbox(Generic[SaidT]):
    """What one end has to say, in order; a beat when it has nothing to say for a while.

    It is as bounded as what is asked of ranks: one command, or its reply, for each of them.

    Args:
        beat: Says that this end is there.
        silence_s: Silence after which the other end gives this one up.
    """

    def __init__(self, beat: SaidT, *, silence_s: float) -> None:
        self._beat = beat
        self._every_s = silence_s / _BEATS_PER_SILENCE
        self._queue: asyncio.Queue[SaidT | _End] = asyncio.Queue()
        self._ended = False

    def put(self, said: SaidT) -> None:
        """Says something; nothing is said after the end."""
        if not self._ended:
            self._queue.put_nowait(said)

    def end(self, error: DomainError | None = None) -> None:
        """Says no more, once; with an error, that one ends the stream."""
        if not self._ended:
            self._ended = True
            self._queue.put_nowait(_End(error))

    async def messages(self) -> AsyncIterator[SaidT]:
        """What is said; waits for the next one, freed by it or by the time for a beat.

        Raises:
            DomainError: The one that the outbox was ended with.
        """
        while True:
            said: SaidT | _End = self._beat
            try:
                async with asyncio.timeout(self._every_s):
                    said = await self._queue.get()
            except TimeoutError:
                pass
            if isinstance(said, _End):
                if said.error is not None:
                    raise said.error
                return
            yield said


class _End:
    def __init__(self, error: DomainError | None) -> None:
        self.error = error


async def heard(next_said: Callable[[], Awaitable[SaidT]], *, silence_s: float, who: str) -> SaidT:
    """Waits for the next message of the other end; freed by it, or by too long a silence.

    Raises:
        DomainError: CHILD_DIED: what is on the other end counts as gone.
    """
    try:
        async with asyncio.timeout(silence_s):
            return await next_said()
    except TimeoutError:
        raise DomainError(
            ErrorReason.CHILD_DIED, f"{who} has said nothing for {silence_s:g} s"
        ) from None
