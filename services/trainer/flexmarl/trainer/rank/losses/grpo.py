"""GRPO: PPO's clipped surrogate on group-relative advantages (arXiv 2402.03300, 1707.06347).

Per token: -min(r A, clip(r, 1 - low, 1 + high) A) x correction - coefficient x entropy, with
r = current / proximal, or current / behaviour with `old = "behaviour"`. At staleness 0 proximal is
the detached value of the same pass, so r is 1 and its gradient is that of the log-probability.
correction = min(proximal / behaviour, cap), detached.
"""

from __future__ import annotations

from typing import Final

import torch

from flexmarl.runtime.run_config import LossConfig
from flexmarl.trainer.rank.losses.base import LossInputs, LossOutput, token_weights

LOG_RATIO_LIMIT: Final = 20.0
"""Log-ratios are clamped to this *before* exp: a clamp after it leaves 0 x inf in the backward."""


def grpo(inputs: LossInputs, config: LossConfig, entropy_coefficient: float) -> LossOutput:
    """Returns the unnormalised loss of a pass."""
    weights = token_weights(inputs, config.aggregation)
    current, mask = inputs.current, inputs.mask
    proximal = current.detach()
    behaviour = inputs.behaviour.to(current.dtype)
    old = behaviour if config.old == "behaviour" else proximal
    ratio = _ratio(current, old, mask)
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    advantage = inputs.advantage.to(current.dtype)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    gap = torch.where(mask, proximal - behaviour, torch.zeros_like(proximal))
    if config.correction_cap is not None:
        correction = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        surrogate = surrogate * correction.clamp(max=config.correction_cap)
    policy_loss = -(weights * surrogate).sum()
    entropy = torch.where(mask, inputs.entropy, torch.zeros_like(inputs.entropy))
    total = policy_loss
    if entropy_coefficient:
        total = total - entropy_coefficient * (weights * entropy).sum()
    with torch.no_grad():
        far = (ratio != clipped) & mask
        return LossOutput(
            total=total,
            sums={
                "loss": total.detach(),
                "entropy": entropy.sum(),
                "ratio": torch.where(mask, ratio, torch.zeros_like(ratio)).sum(),
                "clipped": far.sum(),
                "logprob_gap": gap.abs().sum(),
                "kl_behaviour": -gap.sum(),
            },
            maxima={"logprob_gap_max": gap.abs().max() if gap.numel() else gap.sum()},
        )


def _ratio(current: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # Masked before exp: a masked token's extreme ratio would give 0 x inf = NaN in the backward.
    log_ratio = torch.where(mask, current - old, torch.zeros_like(current))
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
