"""One operation of a policy at a time, in the order in which they came, and how long each took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.trainer_slots import Claim
from flexmarl.runtime.spans import SpanRecorder
from flexmarl.trainer.totals import IN, OUT, Totals

_SWAPS: Final = {"bind": (IN, "swap in"), "suspend": (OUT, "swap out")}


class Turns:
    """The queue of a binding's operations.

    Args:
        claim: Policy and slots, for errors and the timeline.
        max_queued: Most operations that wait; further ones are refused.
        spans: Timeline; each operation is a span on each of the slots, a swap one of its own too.
        totals: Running sums of the trainer.
        check: Called when an operation's turn comes; raises when it may not go on.
    """

    def __init__(
        self,
        claim: Claim,
        *,
        max_queued: int,
        spans: SpanRecorder,
        totals: Totals,
        check: Callable[[], None],
    ) -> None:
        self._claim = claim
        self._max_queued = max_queued
        self._spans = spans
        self._totals = totals
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
        moved = dict(self._totals.traffic_of(self._claim.key.policy))
        self.activity = activity
        try:
            self._check()
            yield
        finally:
            self.activity = ""
            self._turn.release()
            self._record(activity, started, moved, args)

    def _record(
        self, activity: str, started: float, moved: Mapping[str, int], args: dict[str, str | int]
    ) -> None:
        key, ended = self._claim.key, time.time()
        self._totals.ended(key.policy, activity, seconds=ended - started)
        for slot in self._claim.slots:
            self._spans.add(
                f"slot/{slot}",
                f"{key.policy} {activity}",
                started,
                ended,
                policy=key.policy,
                run=key.run_id,
                **args,
            )
        if activity not in _SWAPS:
            return
        direction, name = _SWAPS[activity]
        size_bytes = self._totals.traffic_of(key.policy)[direction] - moved.get(direction, 0)
        for slot in self._claim.slots:
            self._spans.add(
                f"swap/{slot}",
                f"{key.policy} {name}",
                started,
                ended,
                policy=key.policy,
                run=key.run_id,
                bytes=size_bytes,
            )
