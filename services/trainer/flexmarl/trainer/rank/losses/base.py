"""What a loss is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexmarl.runtime.run_config import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Sampled tokens of one pass, flattened; every tensor has shape [tokens].

    Attributes:
        current: Log-probabilities under the weights being trained; carries the gradient.
        entropy: Entropy of each token's distribution; carries the gradient when it is needed.
        behaviour: Log-probabilities that the engine stored.
        advantage: Advantage of each token's row.
        row_tokens: Number of sampled tokens of each token's row.
        mask: False where a token is not trained on (padding, a pass of weight 0).
    """

    current: torch.Tensor
    entropy: torch.Tensor
    behaviour: torch.Tensor
    advantage: torch.Tensor
    row_tokens: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a loss made of a pass.

    Attributes:
        total: Unnormalised sum over tokens, to be divided once at apply; scalar.
        sums: Statistics summed over unmasked tokens, detached scalars by name.
        maxima: Statistics maximised over unmasked tokens, detached scalars by name.
    """

    total: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


Loss = Callable[[LossInputs, LossConfig, float], LossOutput]
"""A loss of (inputs, config, entropy coefficient)."""


def token_weights(inputs: LossInputs, aggregation: str) -> torch.Tensor:
    """Returns the weight of each token in the unnormalised sum; all terms of a loss share it.

    `token_mean`: 1, divided by tokens at apply. `seq_mean`: 1 / tokens of the row, divided by rows.
    """
    mask = inputs.mask.to(inputs.current.dtype)
    if aggregation == "seq_mean":
        return mask / inputs.row_tokens.clamp(min=1).to(mask.dtype)
    return mask
