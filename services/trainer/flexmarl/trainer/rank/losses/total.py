"""The whole loss of a pass: policy term x correction + divergence - entropy, under one aggregation.

What comes out is an unnormalised sum; it is divided once, at apply, by what `Counts.denominator`
names. So it does not matter how rows are dealt to passes, micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexmarl.runtime.algorithm_config import LossConfig
from flexmarl.trainer.rank.losses.base import PolicyInputs, PolicyLoss, bounded_exp
from flexmarl.trainer.rank.losses.correction import correction
from flexmarl.trainer.rank.losses.kl import divergence

INSIDE = (0.9, 1.1)
"""Ratios of trainer and engine that rounding explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Sampled tokens of some whole rows, flattened; every tensor has shape [tokens].

    Attributes:
        current: Log-probabilities under the weights being trained; carries the gradient.
        entropy: Entropy of each token's distribution; carries the gradient when it is needed.
        behaviour: Log-probabilities that the engine stored.
        reference: Log-probabilities under the reference; None without one.
        advantage: Advantage of each token's row.
        row: Number of each token's row, from 0.
        row_tokens: Unmasked tokens of each token's row, at least 1.
        mask: False where a token is not trained on (padding, a pass of weight 0).
        num_rows: Rows.
    """

    current: torch.Tensor
    entropy: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor | None
    advantage: torch.Tensor
    row: torch.Tensor
    row_tokens: torch.Tensor
    mask: torch.Tensor
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Weights of the loss's terms after some number of updates."""

    entropy: float = 0.0
    kl: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a pass's rows gave.

    Attributes:
        total: Unnormalised sum over tokens, to be divided once at apply; scalar.
        sums: Statistics summed over unmasked tokens, detached scalars by name; those that begin
            with "loss" are weighted and divided like the loss.
        maxima: Statistics maximised over unmasked tokens, detached scalars by name.
    """

    total: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


def total_loss(
    inputs: LossInputs, config: LossConfig, coefficients: Coefficients, policy_loss: PolicyLoss
) -> LossOutput:
    """Returns the unnormalised loss of a pass.

    At staleness 0 the proximal log-probability is the detached value of the same pass, so with `old
    = "proximal"` every ratio is 1 and its gradient is that of the log-probability.
    """
    mask, zero = inputs.mask, torch.zeros_like(inputs.current)
    proximal = inputs.current.detach()
    behaviour = inputs.behaviour.to(proximal.dtype)
    policy = _policy_inputs(inputs, behaviour if config.old == "behaviour" else proximal)
    term = policy_loss(policy, config)
    gap = torch.where(mask, proximal - behaviour, zero)
    flags = dict(term.fractions)
    per_token = torch.where(mask, term.per_token, zero)
    sums: dict[str, torch.Tensor] = {}
    if config.correction_cap is not None:
        factor, flags["correction_capped"] = correction(gap, policy, config)
        per_token = per_token * factor
        sums["correction"] = (factor * mask).sum()
    weights = _token_weights(inputs, config)
    total = sums["loss_policy"] = (weights * per_token).sum()
    entropy = torch.where(mask, inputs.entropy, zero)
    if coefficients.entropy:
        sums["loss_entropy"] = -coefficients.entropy * (weights * entropy).sum()
        total = total + sums["loss_entropy"]
    if inputs.reference is not None and config.kl is not None:
        reference = inputs.reference.to(proximal.dtype)
        kl = divergence(inputs.current, reference, mask, config.kl.estimator)
        sums["loss_kl"] = coefficients.kl * (weights * kl).sum()
        sums["kl"] = kl.sum()
        total = total + sums["loss_kl"]
    sums |= {"loss": total, "entropy": entropy.sum()}
    with torch.no_grad():
        ratios, maxima = _statistics(policy.log_ratio.detach(), gap, mask)
        shares = {name: (flag & mask).sum() for name, flag in flags.items()}
        sums = shares | sums | ratios  # a share takes no other number's name
    return LossOutput(
        total=total, sums={name: value.detach() for name, value in sums.items()}, maxima=maxima
    )


def _policy_inputs(inputs: LossInputs, old: torch.Tensor) -> PolicyInputs:
    # Masked before exp: a masked token's extreme ratio would give 0 x inf = NaN in the backward.
    zero = torch.zeros_like(inputs.current)
    return PolicyInputs(
        current=inputs.current,
        old=old,
        log_ratio=torch.where(inputs.mask, inputs.current - old, zero),
        advantage=inputs.advantage.to(inputs.current.dtype),
        mask=inputs.mask,
        row=inputs.row,
        row_tokens=inputs.row_tokens,
        num_rows=inputs.num_rows,
    )


def _token_weights(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """Weight of each token in the unnormalised sum; all terms of a loss share it."""
    mask = inputs.mask.to(inputs.current.dtype)
    if config.aggregation == "seq_mean_token_mean":
        return mask / inputs.row_tokens.to(mask.dtype)
    return mask


def _statistics(
    log_ratio: torch.Tensor, gap: torch.Tensor, mask: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    ratio = bounded_exp(log_ratio) * mask
    drift = bounded_exp(gap)
    outside = (drift < INSIDE[0]) | (drift > INSIDE[1])
    distance = gap.abs()
    return (
        {
            "ratio": ratio.sum(),
            "logprob_gap": distance.sum(),
            "logprob_outside": outside.sum(),
            "kl_behaviour": -gap.sum(),
        },
        {"ratio_max": ratio.max(), "logprob_gap_max": distance.max()},
    )
