"""Running sums of a trainer since its start; kept as work ends, read when somebody looks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

IN: Final = "in"
OUT: Final = "out"

Traffic = Counter[str]
"""Bytes of a policy's state that were read (`IN`) and written (`OUT`) by its ranks."""


@dataclass(slots=True)
class Totals:
    """See the module.

    Attributes:
        operations: Operations that ended and their seconds, by policy and kind.
        traffic: Bytes of state, by policy.
    """

    operations: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    traffic: dict[str, Traffic] = field(default_factory=dict)

    def ended(self, policy: str, kind: str, *, seconds: float) -> None:
        """An operation had its turn."""
        count, total_s = self.operations.get((policy, kind), (0, 0.0))
        self.operations[policy, kind] = (count + 1, total_s + seconds)

    def traffic_of(self, policy: str) -> Traffic:
        """The bytes of one policy, to be added to."""
        return self.traffic.setdefault(policy, Counter())
