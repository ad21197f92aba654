"""Dual-clip PPO (arXiv 1912.09729, equation 5).

Where the advantage is negative a large ratio makes the clipped surrogate's loss unbounded; there
the loss is at most c |A|. Elsewhere it is PPO's.
"""

from __future__ import annotations

import torch

from flexmarl.runtime.algorithm_config import LossConfig
from flexmarl.trainer.rank.losses.base import PolicyInputs, PolicyTerm
from flexmarl.trainer.rank.losses.ppo_clip import ppo_clip


def dual_clip(inputs: PolicyInputs, config: LossConfig) -> PolicyTerm:
    """Returns the loss of each token, and where either clip decides."""
    term = ppo_clip(inputs, config)
    most = -inputs.advantage * config.dual_clip
    beyond = (inputs.advantage < 0) & (term.per_token > most)
    return PolicyTerm(
        per_token=torch.where(beyond, most, term.per_token),
        fractions={**term.fractions, "dual_clip_fraction": beyond},
    )
