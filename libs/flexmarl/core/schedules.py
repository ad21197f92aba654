"""Numbers that move with a policy's own updates, never with wall time or the team's version."""

from __future__ import annotations


def warmed_up(value: float, *, num_updates: int, warmup_updates: int) -> float:
    """Returns a learning rate for the step after `num_updates` updates.

    It rises linearly: step k of the warm-up (from 0) uses (k + 1) / warmup_updates of the value.
    """
    if num_updates >= warmup_updates:
        return value
    return value * (num_updates + 1) / warmup_updates
