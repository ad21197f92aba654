"""PPO's clipped surrogate (arXiv 1707.06347, equation 7), which GRPO uses, too (2402.03300).

Per token: -min(r A, clip(r, 1 - low, 1 + high) A). With high > low it is DAPO's clip-higher (arXiv
2503.14476, equation 10): room for unlikely tokens to become likely.
"""

from __future__ import annotations

import torch

from flexmarl.runtime.algorithm_config import LossConfig
from flexmarl.trainer.rank.losses.base import PolicyInputs, PolicyTerm, bounded_exp


def ppo_clip(inputs: PolicyInputs, config: LossConfig) -> PolicyTerm:
    """Returns the loss of each token, and where the clip decides."""
    return clipped_surrogate(bounded_exp(inputs.log_ratio), inputs.advantage, config)


def clipped_surrogate(
    ratio: torch.Tensor, advantage: torch.Tensor, config: LossConfig
) -> PolicyTerm:
    """Returns the loss of each token for these ratios."""
    free = -ratio * advantage
    bound = -ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantage
    return PolicyTerm(
        per_token=torch.maximum(free, bound), fractions={"clip_fraction": bound > free}
    )
