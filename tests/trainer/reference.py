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
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = lambda x, m=module: (
                m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon))
            )
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name].copy()))
    return lm


def gradient(lm, rows: list[Row], *, aggregation: str, entropy: float) -> np.ndarray:
    """Sum over rows of the unnormalised loss at ratio 1, row by row, no padding, no packing."""
    total = torch.zeros((), dtype=next(lm.parameters()).dtype)
    for row in rows:
        tokens = torch.tensor([row.prompt + row.response])
        start = len(row.prompt)
        logits = lm(input_ids=tokens).logits[0, start - 1 : -1] / row.temperature
        logp = torch.log_softmax(logits, -1)
        chosen = logp[torch.arange(len(row.response)), torch.tensor(row.response)]
        ratio = (chosen - chosen.detach()).exp()
        per_token = -ratio * row.advantage + entropy * (logp.exp() * logp).sum(-1)
        weight = 1.0 / len(row.response) if aggregation == "seq_mean" else 1.0
        total = total + (per_token * weight).sum()
    lm.zero_grad()
    total.backward()
    named = sorted(lm.named_parameters())
    return np.concatenate([parameter.grad.numpy().ravel() for _, parameter in named])
