"""What training a policy takes, learnt from operations that ended.

Only the allocation of slots goes by it, never a result: a wrong estimate costs time, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SCALING_EFFICIENCY: Final = 0.9
"""Part of a unit's speed that is left for each unit added to a policy's process group."""

DEFAULT_RATE: Final = 1000.0
"""Rate of a policy before any was seen, its own or another's."""

_WEIGHT_OF_NEWEST: Final = 0.3


def speed(units: int) -> float:
    """How many times as fast as one unit so many are together."""
    return float(units * SCALING_EFFICIENCY ** (units - 1))


@dataclass(slots=True)
class Estimates:
    """Estimates of one policy.

    Attributes:
        rate: Tokens per second on one unit; None before any were computed.
        bind_s: Binding it to slots.
        suspend_s: Taking it off them.
        batch_tokens: Tokens of its rows in the newest whole batch; 0 before the first.
    """

    rate: float | None = None
    bind_s: float = 0.0
    suspend_s: float = 0.0
    batch_tokens: int = 0

    @property
    def swap_s(self) -> float:
        """Off the slots and on again."""
        return self.bind_s + self.suspend_s

    def computed(self, num_tokens: int, *, took_s: float, units: int) -> None:
        """Gradients of so many tokens were computed."""
        if took_s > 0 and num_tokens > 0:
            newest = num_tokens / (took_s * speed(units))
            self.rate = newest if self.rate is None else _mean(self.rate, newest)

    def bound(self, took_s: float) -> None:
        """A binding was made."""
        self.bind_s = _mean(self.bind_s, took_s) if self.bind_s else took_s

    def suspended(self, took_s: float) -> None:
        """A binding was given up."""
        self.suspend_s = _mean(self.suspend_s, took_s) if self.suspend_s else took_s


def _mean(old: float, newest: float) -> float:
    return old + _WEIGHT_OF_NEWEST * (newest - old)
