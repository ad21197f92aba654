"""What a policy loss is given and what it returns: one number per token, nothing aggregated.

A policy loss is a function of (`PolicyInputs`, `LossConfig`) that returns a `PolicyTerm`.
Correction, aggregation, divergence and entropy are added in `total`, for all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from flexmarl.runtime.algorithm_config import LossConfig

LOG_RATIO_LIMIT: Final = 20.0
"""Log-ratios are clamped to this *before* exp: a clamp after it leaves 0 x inf in the backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """Sampled tokens of some whole rows, flattened; every tensor has shape [tokens].

    Attributes:
        current: Log-probabilities under the weights being trained; carries the gradient.
        old: The ratio's denominator, detached.
        log_ratio: current - old, 0 where masked; carries the gradient.
        advantage: Advantage of each token's row.
        mask: False where a token is not trained on.
        row: Number of each token's row, from 0.
        row_tokens: Unmasked tokens of each token's row, at least 1.
        num_rows: Rows.
    """

    current: torch.Tensor
    old: torch.Tensor
    log_ratio: torch.Tensor
    advantage: torch.Tensor
    mask: torch.Tensor
    row: torch.Tensor
    row_tokens: torch.Tensor
    num_rows: int

    def row_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns, for each token, the sum of its row's values [tokens]."""
        sums = torch.zeros(self.num_rows, dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.row, values)[self.row]

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Returns, for each token, the mean of its row's values; masked ones must be 0 [tokens]."""
        return self.row_sum(values) / self.row_tokens.to(values.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerm:
    """What a policy loss made of some rows.

    Attributes:
        per_token: Loss of each token [tokens]; masked ones are left aside by the caller.
        fractions: Booleans [tokens] whose share is worth knowing, by name.
    """

    per_token: torch.Tensor
    fractions: Mapping[str, torch.Tensor] = field(default_factory=dict)


PolicyLoss = Callable[[PolicyInputs, LossConfig], PolicyTerm]
"""A policy loss."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Returns exp of log-ratios within the limit; beyond it the value is finite, the gradient 0."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
