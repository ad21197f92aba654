"""The soft overlong penalty (DAPO, arXiv 2503.14476, equation 13)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongRule:
    """When a response is too long, and what that costs.

    Attributes:
        max_tokens: From this length on the penalty is whole.
        buffer_tokens: Tokens before it over which the penalty grows linearly from 0.
        penalty: The whole penalty, taken off the reward.
    """

    max_tokens: int
    buffer_tokens: int
    penalty: float = 1.0

    def of(self, num_tokens: int) -> float:
        """Returns what a response of so many tokens adds to its reward: 0 or less."""
        over = num_tokens - (self.max_tokens - self.buffer_tokens)
        if over <= 0:
            return 0.0
        return -self.penalty * min(1.0, over / self.buffer_tokens)
