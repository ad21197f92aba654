"""Log-probabilities and entropies of sampled tokens; their logits are never whole in memory.

[tokens, vocabulary] is made a few tokens at a time, in the forward and again in the backward, where
the gradient of both outputs is written down by hand: one buffer instead of a graph of them.
"""

from __future__ import annotations

from typing import Any, Final

import torch

LOGITS_PER_CHUNK: Final = 1 << 22
"""Most logits alive at once: little memory, and passes over them stay near the processor."""


class _Score(torch.autograd.Function):
    """What is computed, with p = softmax(z) and H the entropy of p.

    z = (h W^T + b) / temperature
    chosen = z_target - log sum exp z, d chosen / dz_j = [j = target] - p_j
    H = log sum exp z - sum p z, dH / dz_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        dtype: torch.dtype,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = temperatures.to(dtype).reciprocal()
        chosen = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        totals, entropies = torch.empty_like(chosen), torch.empty_like(chosen)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = _logits(hidden[part], weight, bias, scale[part])
            peak = logits.amax(-1, keepdim=True)
            powers = (logits - peak).exp_()
            mass = powers.sum(-1)
            totals[part] = mass.log() + peak[:, 0]
            chosen[part] = logits.gather(1, targets[part, None])[:, 0] - totals[part]
            entropies[part] = totals[part] - powers.mul_(logits).sum(-1) / mass
        ctx.save_for_backward(hidden, weight, bias, targets, scale, totals, entropies)
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        return chosen, entropies

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        of_chosen: torch.Tensor,
        of_entropy: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, scale, totals, entropies = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        # Sums over chunks are kept in the scores' precision: bfloat16 would lose the small ones.
        to_weight = torch.zeros_like(weight, dtype=scale.dtype) if ctx.needs_input_grad[1] else None
        to_bias = (
            torch.zeros_like(bias, dtype=scale.dtype)
            if bias is not None and ctx.needs_input_grad[2]
            else None
        )
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            logs = _logits(hidden[part], weight, bias, scale[part]).sub_(totals[part, None])
            powers = logs.exp()
            if of_entropy is None:
                gradient = powers.mul_(-of_chosen[part, None])
            else:
                logs.add_(entropies[part, None]).mul_(of_entropy[part, None])
                gradient = powers.mul_(logs.add_(of_chosen[part, None]).neg_())
            gradient.scatter_add_(1, targets[part, None], of_chosen[part, None])
            gradient.mul_(scale[part, None])
            low = gradient.to(hidden.dtype)
            torch.mm(low, weight, out=to_hidden[part])
            if to_weight is not None:
                _add_product(to_weight, low, hidden[part])
            if to_bias is not None:
                to_bias.add_(gradient.sum(0))
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def score(
    hidden: torch.Tensor,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    dtype: torch.dtype,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (log-probabilities, entropies) of the targets [tokens].

    Args:
        hidden: What the output head reads [tokens, width].
        weight: Output head [vocabulary, width].
        bias: Its bias [vocabulary].
        targets: Sampled tokens [tokens].
        temperatures: Sampling temperature of each token [tokens].
        dtype: Dtype of logits and results.
        entropy: Whether the entropies carry a gradient.
    """
    rows = max(1, LOGITS_PER_CHUNK // weight.shape[0])
    chosen, entropies = _Score.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperatures, dtype, rows
    )
    return chosen, entropies if entropy else entropies.detach()


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).to(scale.dtype)
    return logits.mul_(scale[:, None])


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left^T right."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    else:
        total.add_(left.T @ right)
