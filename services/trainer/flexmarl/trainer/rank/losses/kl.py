"""Estimators of the divergence from a reference, per sampled token.

Schulman 2020, "Approximating KL Divergence", with d = log p(reference) - log p(current):

    k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d

As a term of a loss k2 and k3 pull towards the reference; the gradient of k1 is 0 in expectation, so
k1 is for watching. Peers bound k3 in different ways (one clamps its value to 10, where the gradient
then vanishes). Here d is bounded above, before exp: finite for every d, and the pull stays where
current is far *above* the reference.
"""

from __future__ import annotations

from typing import Literal

import torch

from flexmarl.trainer.rank.losses.base import LOG_RATIO_LIMIT

KlEstimator = Literal["k1", "k2", "k3"]


def divergence(
    current: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """Returns the estimate of each token, 0 where masked [tokens]; carries current's gradient."""
    # Masked first: a masked token's infinite difference would give NaN in the backward.
    gap = torch.where(mask, reference - current, torch.zeros_like(current))
    if estimator == "k1":
        return -gap
    if estimator == "k2":
        return 0.5 * gap.square()
    bounded = gap.clamp(max=LOG_RATIO_LIMIT)
    return bounded.exp() - 1.0 - bounded
