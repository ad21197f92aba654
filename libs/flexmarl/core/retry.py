"""When to try again: exponential and jittered. How long to go on is the caller's patience.

Full jitter (each delay uniform in [0, cap]) spreads the callers of a restarted service best:
https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

_MAX_DOUBLINGS: Final = 32
"""Far beyond any cap, and far below what a float can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays between tries of what failed for want of the service.

    Attributes:
        initial_s: Upper end of the first delay; it doubles with each failure.
        max_s: Upper end of any delay.
    """

    initial_s: float = 0.02
    max_s: float = 0.5

    def delay_s(self, failed: int, *, rng: Random) -> float:
        """Delay before the next try.

        Args:
            failed: Tries that failed in a row, at least 1.
            rng: Source of the jitter.
        """
        cap_s = min(self.max_s, self.initial_s * 2.0 ** min(failed - 1, _MAX_DOUBLINGS))
        return rng.uniform(0.0, cap_s)
