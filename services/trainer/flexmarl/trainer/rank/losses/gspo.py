"""GSPO: one ratio per row, the geometric mean of its tokens' ratios (arXiv 2507.18071, equation 7).

In the paper's form per token (equation 13): s = sg[row ratio] x current / sg[current], so that each
token carries its own gradient. The paper aggregates by `seq_mean_token_mean` and clips very tightly
(3e-4, 4e-4).
"""

from __future__ import annotations

from flexmarl.runtime.algorithm_config import LossConfig
from flexmarl.trainer.rank.losses.base import PolicyInputs, PolicyTerm, bounded_exp
from flexmarl.trainer.rank.losses.ppo_clip import clipped_surrogate


def gspo(inputs: PolicyInputs, config: LossConfig) -> PolicyTerm:
    """Returns the loss of each token, and where the clip decides."""
    of_row = inputs.row_mean(inputs.log_ratio.detach())
    own = inputs.log_ratio - inputs.log_ratio.detach()
    return clipped_surrogate(bounded_exp(of_row + own), inputs.advantage, config)
