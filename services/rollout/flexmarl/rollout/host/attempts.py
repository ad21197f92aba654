"""The attempts that a host has taken: in progress, or ended and not yet stored by the dispatcher.

Invariants: every accepted attempt ends exactly once (B3: what comes later for it is dropped), and
its result is kept until the dispatcher says that it is stored. Both kinds together are bounded
(I13): a full book accepts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from flexmarl.api.rollout.v1.engine_pb2 import GenerateRequest, GenerateResult, HeldAttempt


class Running(NamedTuple):
    """An attempt in progress; `deadline` is monotonic seconds."""

    request: GenerateRequest
    deadline: float


class Ended(NamedTuple):
    """An attempt that has ended, and what of its request a new dispatcher must know.

    The request itself is let go: prompts are long, and results may wait.
    """

    result: GenerateResult
    instance_id: str
    version: int
    input_hash: bytes


class AttemptBook:
    """See the module.

    Args:
        max_attempts: Most attempts in progress and unacknowledged together.
    """

    def __init__(self, *, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._running: dict[str, Running] = {}
        self._ended: dict[str, Ended] = {}
        self._per_instance: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._running or attempt_id in self._ended

    @property
    def full(self) -> bool:
        """Whether no further attempt is accepted."""
        return len(self) >= self._max_attempts

    @property
    def num_running(self) -> int:
        """Attempts in progress."""
        return len(self._running)

    def num_running_on(self, instance_id: str) -> int:
        """Attempts in progress on an instance."""
        return self._per_instance[instance_id]

    def accept(self, request: GenerateRequest, *, deadline: float) -> None:
        """Take an attempt that the book does not hold."""
        assert request.attempt_id not in self, "callers drop repeated requests"
        self._running[request.attempt_id] = Running(request, deadline)
        self._per_instance[request.instance_id] += 1

    def running(self, attempt_id: str) -> Running | None:
        """An attempt in progress."""
        return self._running.get(attempt_id)

    def running_on(self, instance_id: str) -> list[GenerateRequest]:
        """Attempts in progress on an instance."""
        return [
            running.request
            for running in self._running.values()
            if running.request.instance_id == instance_id
        ]

    def overdue(self, now: float) -> list[GenerateRequest]:
        """Attempts in progress whose deadline has passed."""
        return [run.request for run in self._running.values() if run.deadline <= now]

    def end(self, result: GenerateResult) -> bool:
        """Record the end of an attempt; False when it is not in progress (any more)."""
        running = self._running.pop(result.attempt_id, None)
        if running is None:
            return False
        request = running.request
        self._per_instance[request.instance_id] -= 1
        result.num_kept = request.num_kept
        result.input_hash = request.input_hash
        self._ended[result.attempt_id] = Ended(
            result, request.instance_id, request.version, request.input_hash
        )
        return True

    def acknowledge(self, attempt_ids: Iterable[str]) -> None:
        """Forget results that are stored; unknown ids are ignored."""
        for attempt_id in attempt_ids:
            self._ended.pop(attempt_id, None)

    def unacknowledged(self) -> list[GenerateResult]:
        """Results to send again to a dispatcher that has just been reached."""
        return [ended.result for ended in self._ended.values()]

    def held(self) -> dict[str, HeldAttempt]:
        """All attempts in the book, by id."""
        # Alike in what a new dispatcher must know: (instance, version, input hash, kept tokens).
        known = {
            name: (asked.instance_id, asked.version, asked.input_hash, asked.num_kept)
            for name, (asked, _) in self._running.items()
        } | {
            name: (ended.instance_id, ended.version, ended.input_hash, ended.result.num_kept)
            for name, ended in self._ended.items()
        }
        return {
            name: HeldAttempt(
                instance_id=instance_id, version=version, input_hash=input_hash, num_kept=num_kept
            )
            for name, (instance_id, version, input_hash, num_kept) in known.items()
        }
