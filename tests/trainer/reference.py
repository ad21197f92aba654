"""The gradient in one pass over all rows, written down plainly: the reference of I6."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from trainer.harness import Row


def build(model: Path, weights: dict[str, np.ndarray], dtype: torch.dtype):
    from transformers import AutoConfig, AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=dtype)
    lm.eval()
    for module in lm.modules():  # the library's norm casts to float32 inside
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: (
                m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon))
            )
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name].copy()))
    return lm


def gradient(
    lm,
    rows: list[Row],
    *,
    aggregation: str,
    entropy: float = 0.0,
    kind: str = "ppo_clip",
    old: str = "proximal",
    cap: float | None = None,
    kl: float = 0.0,
    first=None,
) -> np.ndarray:
    """Sum over rows of the unnormalised loss, row by row, no padding, no packing.

    Args:
        lm: Model.
        rows: Rows.
        aggregation: Weight of tokens.
        entropy: Coefficient of the entropy bonus.
        kind: Policy loss, with clips of 0.2 and 3.
        old: Denominator of the ratio.
        cap: Cap of the correction per token.
        kl: Coefficient of k3 against `first`.
        first: The model with its first weights.
    """
    total = torch.zeros((), dtype=next(lm.parameters()).dtype)
    for row in rows:
        chosen, logp = _log_probs(lm, row)
        behaviour = torch.tensor(row.logprobs, dtype=chosen.dtype)
        base = behaviour if old == "behaviour" else chosen.detach()
        per_token = _policy_loss(kind, chosen, chosen - base, row.advantage)
        if cap is not None:
            per_token = per_token * (chosen.detach() - behaviour).exp().clamp(max=cap)
        per_token = per_token + entropy * (logp.exp() * logp).sum(-1)
        if kl:
            with torch.no_grad():
                reference, _ = _log_probs(first, row)
            gap = reference - chosen
            per_token = per_token + kl * (gap.exp() - 1 - gap)
        weight = 1.0 / len(row.response) if aggregation == "seq_mean_token_mean" else 1.0
        total = total + (per_token * weight).sum()
    lm.zero_grad()
    total.backward()
    named = sorted(lm.named_parameters())
    return np.concatenate([parameter.grad.numpy().ravel() for _, parameter in named])


def logprobs(lm, row: Row) -> list[float]:
    """Of a row's response tokens."""
    with torch.no_grad():
        return _log_probs(lm, row)[0].tolist()


def _log_probs(lm, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.tensor([row.prompt + row.response])
    logits = lm(input_ids=tokens).logits[0, len(row.prompt) - 1 : -1] / row.temperature
    logp = torch.log_softmax(logits, -1)
    return logp[torch.arange(len(row.response)), torch.tensor(row.response)], logp


def _policy_loss(
    kind: str, chosen: torch.Tensor, log_ratio: torch.Tensor, advantage: float
) -> torch.Tensor:
    if kind == "cispo":
        return -log_ratio.exp().clamp(0.8, 1.2).detach() * advantage * chosen
    if kind == "gspo":  # one ratio for the row, not per token as in the code
        log_ratio = log_ratio.mean().expand(len(chosen))
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    if kind == "dual_clip" and advantage < 0:
        return loss.clamp(max=-3.0 * advantage)
    return loss
