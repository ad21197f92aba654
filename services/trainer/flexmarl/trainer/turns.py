"""One operation of a policy at a time, in the order in which they came, and how long each took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.trainer_slots import Claim
from flexmarl.runtime.spans import SpanRecorder


class Turns:
    """The queue of a binding's operations.

    Args:
        claim: Policy and slots, for errors and the timeline.
        max_queued: Most operations that wait; further ones are refused.
        spans: Timeline; each operation is a span on each of the slots.
        check: Called when an operation's turn comes; raises when it may not go on.
    """

    def __init__(
        self, claim: Claim, *, max_queued: int, spans: SpanRecorder, check: Callable[[], None]
    ) -> None:
        self._claim = claim
        self._max_queued = max_queued
        self._spans = spans
        self._check = check
        self._turn = asyncio.Lock()
        self._waiting = 0
        self.activity = ""

    @asynccontextmanager
    async def take(self, activity: str, **args: str | int) -> AsyncIterator[None]:
        """Waits for this operation's turn (freed by the end of the one before); then works.

        Raises:
            DomainError: QUEUE_FULL, and what the check raises.
        """
        if self._waiting >= self._max_queued:
            raise DomainError(
                ErrorReason.QUEUE_FULL, f"{self._claim.key}: {self._waiting} operations wait"
            )
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        started = time.time()
        self.activity = activity
        try:
            self._check()
            yield
        finally:
            self.activity = ""
            self._turn.release()
            self._record(activity, started, args)

    def _record(self, activity: str, started: float, args: dict[str, str | int]) -> None:
        key = self._claim.key
        for slot in self._claim.slots:
            self._spans.add(
                f"slot/{slot}",
                f"{key.policy} {activity}",
                started,
                time.time(),
                policy=key.policy,
                run=key.run_id,
                **args,
            )
