"""What a worker says: events of one turn of the loop, and all that come meanwhile, in a frame."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from flexmarl.api.rollout.v1.worker_pb2 import WorkerEvent
from flexmarl.rollout.pieces import frames_of


class Outbox:
    """Collects events for one sender.

    It is bounded by the samples in progress, which the dispatcher bounds. `pump` waits for an event
    (freed by `event`), then for the link to take the frame (freed by the dispatcher reading).

    Args:
        send: Sends a frame.
    """

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._event = WorkerEvent()
        self._filled = asyncio.Event()

    def event(self) -> WorkerEvent:
        """The event under construction; what is added to it is sent soon."""
        self._filled.set()
        return self._event

    async def pump(self) -> None:
        """Sends until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            full, self._event = self._event, WorkerEvent()
            for frame in frames_of(full):
                await self._send(frame)
