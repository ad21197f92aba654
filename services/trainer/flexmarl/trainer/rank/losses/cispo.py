"""CISPO: the clipped ratio only weighs the log-probability (arXiv 2506.13585, equation 4).

Per token: -sg[clip(r, 1 - low, 1 + high)] A log p. No token loses its gradient to the clip.
"""

from __future__ import annotations

import torch

from flexmarl.runtime.algorithm_config import LossConfig
from flexmarl.trainer.rank.losses.base import PolicyInputs, PolicyTerm, bounded_exp


def cispo(inputs: PolicyInputs, config: LossConfig) -> PolicyTerm:
    """Returns the loss of each token, and where the clip decides."""
    ratio = bounded_exp(inputs.log_ratio.detach())
    weight = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    # Masked before the product: an infinite log-probability times 0 would be NaN.
    current = torch.where(inputs.mask, inputs.current, torch.zeros_like(inputs.current))
    return PolicyTerm(
        per_token=-weight * inputs.advantage * current,
        fractions={"clip_fraction": ratio != weight},
    )
