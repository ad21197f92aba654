"""A simulated rank in the place of a child process: frames in, frames out, and it can be killed."""

from __future__ import annotations

import asyncio
import signal
from typing import Final, Self

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.logging import get_logger
from flexmarl.trainer.simulated.rank import SimulatedRank

_MAX_FRAMES: Final = 64

_log = get_logger(__name__)


class SimulatedLink:
    """The service's end: `send` takes commands, the iterator gives replies until the rank ends.

    Its task answers one command at a time; it waits for the next, and `close` ends it.
    """

    def __init__(self, rank: SimulatedRank) -> None:
        self._rank = rank
        self._commands: asyncio.Queue[bytes] = asyncio.Queue(_MAX_FRAMES)
        # Bounded by the commands: each gives one.
        self._replies: asyncio.Queue[bytes | None] = asyncio.Queue()
        ready = rank_pb2.RankReply(ready=rank_pb2.RankReady())
        self._replies.put_nowait(ready.SerializeToString())
        self._task = asyncio.create_task(self._work(), name="simulated rank")
        self._task.add_done_callback(self._ended)

    @property
    def ended(self) -> asyncio.Task[None]:
        """The rank's life."""
        return self._task

    async def send(self, frame: bytes) -> None:
        """Hands a command over.

        Raises:
            DomainError: CHILD_DIED when the rank has ended.
        """
        if self._task.done():
            raise DomainError(ErrorReason.CHILD_DIED, "the simulated rank has ended")
        await self._commands.put(frame)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        # Waits for the next reply, freed by the rank's end.
        frame = await self._replies.get()
        if frame is None:
            raise StopAsyncIteration
        return frame

    def close(self) -> None:
        """Ends the rank."""
        self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._replies.put_nowait(None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # What a child process would have left on its standard error.
            _log.error("simulated_rank_failed", exc_info=error)

    async def _work(self) -> None:
        while True:
            self._replies.put_nowait(await self._rank.answer(await self._commands.get()))


class SimulatedProcess:
    """What `Worker` sees of a child process.

    Args:
        rank: Its unit.
    """

    def __init__(self, rank: SimulatedRank) -> None:
        self.pid = 0
        self.link = SimulatedLink(rank)

    async def wait(self, *, timeout_s: float | None = None) -> int:
        """Waits for its end.

        Raises:
            TimeoutError: It goes on.
        """
        done, _ = await asyncio.wait([self.link.ended], timeout=timeout_s)
        if not done:
            raise TimeoutError
        return -signal.SIGKILL

    def kill(self) -> None:
        """Ends it at once."""
        self.link.close()
