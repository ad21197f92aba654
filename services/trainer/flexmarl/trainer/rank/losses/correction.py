"""Truncated importance sampling: makes up for what engine and trainer disagree on.

The factor is min(proximal / behaviour, cap), detached (as in arXiv 1802.01561, equation 1). Per row
it is the product over the row's tokens, bounded as a whole.
"""

from __future__ import annotations

import torch

from flexmarl.runtime.algorithm_config import LossConfig
from flexmarl.trainer.rank.losses.base import PolicyInputs, bounded_exp


def correction(
    gap: torch.Tensor, inputs: PolicyInputs, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (factor of each token, where the cap decides); 1 where masked.

    Args:
        gap: proximal - behaviour per token, 0 where masked, detached.
        inputs: The pass.
        config: With a cap.
    """
    assert config.correction_cap is not None, "a correction has a cap"
    factor = bounded_exp(inputs.row_sum(gap) if config.correction == "sequence" else gap)
    return factor.clamp(max=config.correction_cap), factor > config.correction_cap
