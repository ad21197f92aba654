"""What goes to the dispatcher next: results in order, and the newest status of each instance.

Bounded by what fills it: results by the attempt book, statuses by the number of instances. What is
taken at once is bounded in bytes, too: all results that a dispatcher missed while it was away may
be more than a message holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice

from flexmarl.api.rollout.v1.engine_pb2 import (
    ConnectEngineHostRequest,
    GenerateResult,
    InstanceStatus,
)
from flexmarl.rollout.pieces import first_of

_MAX_RESULTS = 1024


class Outbox:
    """Coalesces without a timer: whatever gathered while the last message was sent goes next."""

    def __init__(self) -> None:
        self._results: list[GenerateResult] = []
        self._statuses: dict[str, InstanceStatus] = {}
        self._filled = asyncio.Event()

    def reset(self, results: Iterable[GenerateResult]) -> None:
        """Start anew at a new connection, whose hello has told all statuses."""
        self._results = list(results)
        self._statuses.clear()
        self._note()

    def add_results(self, results: Iterable[GenerateResult]) -> None:
        """Queue results."""
        self._results.extend(results)
        self._note()

    def set_status(self, status: InstanceStatus) -> None:
        """Queue a status; an older one of the same instance that has not gone is replaced."""
        self._statuses[status.instance_id] = status
        self._note()

    async def take(self) -> ConnectEngineHostRequest:
        """Wait for something to send (freed by the setters) and take it."""
        await self._filled.wait()
        results = first_of(islice(self._results, _MAX_RESULTS))
        del self._results[: len(results)]
        message = ConnectEngineHostRequest(instances=self._statuses.values(), results=results)
        self._statuses.clear()
        self._note()
        return message

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self._results and not self._statuses

    def _note(self) -> None:
        if self.empty:
            self._filled.clear()
        else:
            self._filled.set()
