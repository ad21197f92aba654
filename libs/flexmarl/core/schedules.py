"""Numbers that move with a policy's own updates, never with wall time or the team's version."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSchedule:
    """A learning rate over a policy's updates: a linear rise, then a decay.

    Attributes:
        peak: Rate at the end of the warm-up.
        warmup_updates: Updates over which it rises; step k (from 0) uses (k + 1) / warmup_updates.
        decay: How it falls afterwards; "cosine" is half a period (arXiv 1608.03983).
        total_updates: Update at which the decay ends.
        final_share: Share of the peak that is left then.
    """

    peak: float
    warmup_updates: int = 0
    decay: Decay = "constant"
    total_updates: int = 0
    final_share: float = 0.0

    def at(self, num_updates: int) -> float:
        """Returns the rate of the step after `num_updates` updates."""
        if num_updates < self.warmup_updates:
            return self.peak * (num_updates + 1) / self.warmup_updates
        if self.decay == "constant":
            return self.peak
        length = max(self.total_updates - self.warmup_updates, 1)
        share = min((num_updates - self.warmup_updates) / length, 1.0)
        left = 1.0 - share if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
        return self.peak * (self.final_share + (1.0 - self.final_share) * left)
