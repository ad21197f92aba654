"""When to try again: bounded, exponential, jittered.

Full jitter (each delay uniform in [0, cap]) spreads the callers of a restarted service best:
https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long to repeat what failed for want of the service.

    Attributes:
        max_attempts: Tries in all, the first included.
        initial_s: Upper end of the first delay.
        max_s: Upper end of any delay.
        multiplier: Growth of the upper end per attempt.
        patience_s: How long to go on beyond the timeout of one try, for services that are restarted
            under a running caller; None: all tries share the call's timeout.
    """

    max_attempts: int = 6
    initial_s: float = 0.05
    max_s: float = 1.0
    multiplier: float = 2.0
    patience_s: float | None = None


def patient(patience_s: float) -> RetryPolicy:
    """Repeats for so long, bounded by time rather than by attempts."""
    return RetryPolicy(max_attempts=1_000_000, patience_s=patience_s)


NO_RETRY = RetryPolicy(max_attempts=1)
"""For calls that must be tried once."""


def next_delay_s(
    policy: RetryPolicy, *, failed_attempts: int, left_s: float | None, rng: Random
) -> float | None:
    """Delay before the next try, or None when it should not be made.

    Args:
        policy: Bounds.
        failed_attempts: Tries that failed so far, at least 1.
        left_s: Time until the caller's deadline; None: unlimited.
        rng: Source of the jitter.
    """
    if failed_attempts >= policy.max_attempts:
        return None
    cap_s = min(policy.max_s, policy.initial_s * policy.multiplier ** (failed_attempts - 1))
    delay_s = rng.uniform(0.0, cap_s)
    if left_s is not None and delay_s >= left_s:
        return None
    return delay_s
