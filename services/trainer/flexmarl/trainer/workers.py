"""The worker processes of a trainer's slots: started, warmed, watched, replaced.

Each slot has one worker. `run` is its supervisor: it waits for the worker to be warm, then for its
replies; the worker's end frees it, fails what was in progress, and starts the next worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError, ErrorReason, find_reason
from flexmarl.runtime.logging import get_logger

RESTART_DELAYS_S = (0.0, 0.5, 2.0, 5.0)
"""Waits before the first and further restarts in a row; a warm worker resets the row."""

_log = get_logger(__name__)


class RankLink(Protocol):
    """Frames to and from a rank; the iterator ends with it."""

    async def send(self, frame: bytes, /) -> None:
        """Sends a command frame."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Reply frames; the first one comes when the rank is warm."""
        ...


class RankProcess(Protocol):
    """A rank as its slot sees it: a child process, or a simulated one."""

    @property
    def pid(self) -> int:
        """Process id; 0 when it has none of its own."""
        ...

    @property
    def link(self) -> RankLink:
        """Its link."""
        ...

    async def wait(self, *, timeout_s: float | None = None) -> int:
        """Waits for its end."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...


Spawn = Callable[[], Awaitable[RankProcess]]


class Worker:
    """One slot's worker, as the service sees it.

    Args:
        slot: Name of the slot.
        position: Number of the slot in the trainer, the worker's global number.
        spawn: Starts a worker process.
        warm_timeout_s: Longest wait for it to become warm.
        on_death: Called when a worker has died or was ended, before the next one starts.
    """

    def __init__(
        self,
        *,
        slot: str,
        position: int,
        spawn: Spawn,
        warm_timeout_s: float,
        on_death: Callable[[Worker], None],
    ) -> None:
        self.slot = slot
        self.position = position
        self.generation = 0
        self._was_warm = False
        self._replaced = False
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._spawn = spawn
        self._warm_timeout_s = warm_timeout_s
        self._on_death = on_death
        self._child: RankProcess | None = None
        self._ready = asyncio.Event()
        self._replies: dict[int, asyncio.Future[rank_pb2.RankReply]] = {}
        self._next_command = 0

    @property
    def ready(self) -> bool:
        """Whether the worker is warm."""
        return self._ready.is_set()

    @property
    def pid(self) -> int:
        """Process id; 0 while there is none."""
        return 0 if self._child is None else self._child.pid

    def busy_seconds(self) -> float:
        """Seconds of work since the trainer started, work in progress included."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._replies else 0.0)

    async def run(self) -> None:
        """Keeps a warm worker in the slot until cancelled."""
        failures = 0
        while True:
            await asyncio.sleep(RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S) - 1)])
            try:
                self._child = await self._spawn()
                await self._become_warm(self._child)
                failures = 0
                await self._follow(self._child)
                if not self._replaced:
                    _log.warning("worker_died", slot=self.slot, pid=self.pid)
            except DomainError as error:
                _log.error("worker_not_started", slot=self.slot, error=str(error))
            except asyncio.CancelledError:
                self._was_warm = False  # the trainer closes: nobody has to hear of this end
                raise
            finally:
                self._end()
            failures = 0 if self._replaced else failures + 1
            self._replaced = False

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Waits until the worker is warm.

        Raises:
            DomainError: NOT_READY after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise DomainError(
                ErrorReason.NOT_READY,
                f"the worker of slot {self.slot} is not warm after {timeout_s:g} s",
                {"slot": self.slot},
            ) from None

    async def call(self, command: rank_pb2.RankCommand, *, timeout_s: float) -> rank_pb2.RankReply:
        """Sends a command and waits for its reply.

        A worker that does not answer in time is killed: what it would do later must not happen.

        Raises:
            DomainError: CHILD_DIED, DEADLINE_EXCEEDED, or the failure that the worker reported.
        """
        child = self._child
        if child is None or not self.ready:
            raise self._died()
        self._next_command += 1
        command.command_id = self._next_command
        reply: asyncio.Future[rank_pb2.RankReply] = asyncio.get_running_loop().create_future()
        if not self._replies:
            self._busy_since = time.monotonic()
        self._replies[command.command_id] = reply
        try:
            async with asyncio.timeout(timeout_s):
                await child.link.send(command.SerializeToString())
                answer = await reply
        except TimeoutError:
            if child is self._child:
                self.kill()
            kind = command.WhichOneof("command")
            raise DomainError(
                ErrorReason.DEADLINE_EXCEEDED,
                f"slot {self.slot} (pid {child.pid}) did not finish {kind} within {timeout_s:g} s "
                "and was ended",
                {"slot": self.slot, "pid": str(child.pid)},
            ) from None
        finally:
            self._replies.pop(command.command_id, None)
            if not self._replies:
                self._busy_s += time.monotonic() - self._busy_since
        return unpacked(answer)

    def kill(self) -> None:
        """Ends the worker; the supervisor starts another one.

        From now on it counts as dead: whoever is bound to the slot next waits for the other one.
        """
        self._ready.clear()
        if self._child is not None:
            self._child.kill()
        self._tell_death()

    def replace(self) -> None:
        """Ends the worker because a fresh one is wanted; the next one starts at once."""
        self._replaced = True
        self.kill()

    async def _become_warm(self, child: RankProcess) -> None:
        try:
            async with asyncio.timeout(self._warm_timeout_s):
                frame = await anext(aiter(child.link))
        except (TimeoutError, StopAsyncIteration):
            child.kill()
            raise DomainError(
                ErrorReason.CHILD_DIED,
                f"the worker of slot {self.slot} (pid {child.pid}) did not become warm",
            ) from None
        ready = rank_pb2.RankReply.FromString(frame).ready
        self.generation += 1
        self._was_warm = True
        self._ready.set()
        _log.info("worker_warm", slot=self.slot, pid=child.pid, seconds=round(ready.seconds, 3))

    async def _follow(self, child: RankProcess) -> None:
        async for frame in child.link:
            reply = rank_pb2.RankReply.FromString(frame)
            future = self._replies.get(reply.command_id)
            if future is not None and not future.done():
                future.set_result(reply)
        with contextlib.suppress(TimeoutError):
            await child.wait(timeout_s=5.0)

    def _end(self) -> None:
        died = self._died()
        self._ready.clear()
        if self._child is not None:
            self._child.kill()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(died)
        self._tell_death()
        self._child = None

    def _tell_death(self) -> None:
        """Tells of a warm worker's death, once."""
        if self._was_warm:
            self._was_warm = False
            self._on_death(self)

    def _died(self) -> DomainError:
        return DomainError(
            ErrorReason.CHILD_DIED,
            f"the worker of slot {self.slot} (pid {self.pid}) died",
            {"slot": self.slot, "pid": str(self.pid)},
        )


def unpacked(reply: rank_pb2.RankReply) -> rank_pb2.RankReply:
    """Returns a reply that is no failure.

    Raises:
        DomainError: The failure that the rank reported.
    """
    if reply.WhichOneof("reply") == "failure":
        failure = reply.failure
        reason = find_reason(failure.reason) or ErrorReason.INTERNAL
        raise DomainError(reason, failure.message, dict(failure.metadata))
    return reply
