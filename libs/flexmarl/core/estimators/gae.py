"""Generalised advantage estimation (arXiv 1506.02438, equation 16) over the tokens of one row.

Tokens that the policy did not choose (mask 0: observations, padding) are not steps: values, deltas
and returns reach over them as if they were not there, so that the discount counts actions. A reward
that lies on such a token belongs to the action before it.

No run uses it yet, because it needs a critic; it is the reference for whoever adds one.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexmarl.core.estimators.base import whitening


def gae(
    rewards: Sequence[float],
    values: Sequence[float],
    mask: Sequence[int],
    *,
    gamma: float,
    lam: float,
) -> tuple[list[float], list[float]]:
    """Returns (advantages, returns) per token, 0 where the mask is 0.

    Args:
        rewards: Reward per token.
        values: The critic's estimate before each token.
        mask: 1 for tokens that the policy chose.
        gamma: Discount per action.
        lam: Weight of longer horizons; 1 gives Monte Carlo returns.

    Raises:
        ValueError: Lengths differ, or a reward comes before the first action.
    """
    if not len(rewards) == len(values) == len(mask):
        raise ValueError(f"{len(rewards)} rewards, {len(values)} values, {len(mask)} mask entries")
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    next_value = running = pending = 0.0
    for token in reversed(range(len(mask))):
        pending += rewards[token]
        if not mask[token]:
            continue
        delta = pending + gamma * next_value - values[token]
        running = delta + gamma * lam * running
        advantages[token], returns[token] = running, running + values[token]
        next_value, pending = values[token], 0.0
    if pending:
        raise ValueError("a reward comes before the first action")
    return advantages, returns


def whitened(advantages: Sequence[float], mask: Sequence[int]) -> list[float]:
    """Returns advantages with mean 0 and variance 1 over the masked tokens, 0 elsewhere."""
    chosen = [value for value, keep in zip(advantages, mask, strict=True) if keep]
    if not chosen:
        return [0.0] * len(mask)
    mean, factor = whitening(chosen)
    return [
        (value - mean) * factor if keep else 0.0
        for value, keep in zip(advantages, mask, strict=True)
    ]
