"""Attempts whose vertices are asked for again: of a dispatcher before this one, or a dead worker.

Workflows run again after a crash and come to the calls that were in progress. Each is attached to
its attempt of before, which its host went on with: what was sampled is not sampled a second time.

Invariant: an attempt is held until its vertex is ready, its sample ends, its version is forgotten,
or it is lost. So what is held is bounded by what the hosts hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flexmarl.core.dispatch_events import AttemptSucceeded, HeldAttempt, split_attempt_id


@dataclass(slots=True)
class Held:
    """One held attempt.

    Attributes:
        attempt: What its host says of it.
        success: How it ended; None while it has not.
    """

    attempt: HeldAttempt
    success: AttemptSucceeded | None = None

    @property
    def number(self) -> int:
        """Number of the attempt."""
        return split_attempt_id(self.attempt.attempt_id)[1]

    @property
    def vertex_id(self) -> str:
        """Its vertex."""
        return split_attempt_id(self.attempt.attempt_id)[0]


class HeldAttempts:
    """See the module."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, Held]] = {}

    def __iter__(self) -> Iterator[Held]:
        return (held for of_sample in self._held.values() for held in of_sample.values())

    def __contains__(self, attempt_id: str) -> bool:
        return self.get(attempt_id) is not None

    def add(self, attempt: HeldAttempt) -> None:
        """Holds an attempt; one that is held already stays as it is."""
        of_sample = self._held.setdefault(_sample_of(attempt.attempt_id), {})
        of_sample.setdefault(attempt.attempt_id, Held(attempt))

    def get(self, attempt_id: str) -> Held | None:
        """A held attempt."""
        return self._held.get(_sample_of(attempt_id), {}).get(attempt_id)

    def drop(self, attempt_id: str) -> None:
        """Forgets an attempt; one that is not held is left alone."""
        sample_id = _sample_of(attempt_id)
        of_sample = self._held.get(sample_id, {})
        if of_sample.pop(attempt_id, None) is not None and not of_sample:
            del self._held[sample_id]

    def take(self, vertex_id: str) -> list[Held]:
        """The attempts of a vertex, best first: what has ended, then the newest."""
        if not self._held:  # nearly always
            return []
        of_sample = self._held.get(_sample_of(vertex_id), {})
        found = [held for held in of_sample.values() if held.vertex_id == vertex_id]
        return self._taken(found)

    def take_sample(self, sample_id: str) -> list[Held]:
        """The attempts of a sample that has ended."""
        return self._taken(list(self._held.get(sample_id, {}).values()))

    def take_below(self, version: int) -> list[Held]:
        """The attempts of versions that are forgotten."""
        return self._taken([held for held in self if held.attempt.version < version])

    def running_at(self, instance_id: str) -> list[str]:
        """Attempts that an instance has not ended."""
        return [
            held.attempt.attempt_id
            for held in self
            if held.success is None and held.attempt.instance_id == instance_id
        ]

    def _taken(self, found: list[Held]) -> list[Held]:
        for held in found:
            self.drop(held.attempt.attempt_id)
        return sorted(found, key=lambda held: (held.success is None, -held.number))


def _sample_of(vertex_or_attempt_id: str) -> str:
    return vertex_or_attempt_id.partition("#")[0].partition("/")[0]
