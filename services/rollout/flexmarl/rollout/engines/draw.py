"""Drawing the next token of each row by inverse transform, and its log-probability.

The uniform numbers come from `core.sampling`, keyed (vertex seed, t), so the batch cannot change
them. It can change the logits in their last bits, because matrix kernels block differently; the
inverse of the cumulative distribution is computed in float64, and turns such a difference into
another token only when the number falls within it of a boundary: about one draw in 10^6 with
float32 weights, and one in 10^15 with float64.

Log-probabilities are those of softmax(logits / temperature) over the full vocabulary, whatever
top-k and top-p cut away, because the trainer computes the same. Greedy rows report temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row is drawn: temperature 0 is greedy; top_k 0, top_p 1, min_p 0 cut nothing."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def plain(self) -> bool:
        """Whether the full distribution is drawn from."""
        return self.temperature > 0 and self.top_k == 0 and self.top_p >= 1 and self.min_p == 0


@lru_cache(maxsize=1024)
def row_sampling(
    *, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> RowSampling:
    """The one object of these values: rows that share it are told alike without comparing."""
    return RowSampling(temperature, top_k, top_p, min_p)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token per row; `logprobs` holds NaN where the row's logits are not finite."""

    tokens: list[int]
    logprobs: list[float]


def draw(logits: Tensor, rows: list[RowSampling], uniforms: list[float]) -> Drawn:
    """Draw one token per row.

    Args:
        logits: (n, vocabulary).
        rows: How to draw each.
        uniforms: One number in [0, 1) per row.
    """
    scaled = logits.to(torch.float64)
    first = rows[0]
    alike = all(row is first or row == first for row in rows)
    if not (alike and first.temperature in (0.0, 1.0)):
        scales = [row.temperature or 1.0 for row in rows]
        scaled = scaled / torch.tensor(scales, dtype=torch.float64, device=logits.device)[:, None]
    top = scaled.amax(dim=-1, keepdim=True)
    mass = torch.exp(scaled - top)
    cumulative = mass.cumsum(dim=-1)
    total = cumulative[:, -1:]
    number = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]
    if alike and first.plain:
        tokens = _invert(cumulative, number)
    else:
        tokens = _draw_mixed(scaled, mass, cumulative, number, rows)
    logprobs = scaled.gather(1, tokens) - top - total.log()
    # One non-finite logit makes the whole row's total non-finite.
    logprobs = torch.where(total.isfinite(), logprobs, torch.nan)
    return Drawn(tokens[:, 0].tolist(), logprobs[:, 0].tolist())


def _invert(cumulative: Tensor, number: Tensor) -> Tensor:
    """Index of the first entry above number x total: it always has positive mass."""
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(number * total, below_total)
    index = torch.searchsorted(cumulative, target, right=True)
    return index.clamp_(max=cumulative.shape[1] - 1)


def _draw_mixed(
    scaled: Tensor, mass: Tensor, cumulative: Tensor, number: Tensor, rows: list[RowSampling]
) -> Tensor:
    tokens = _invert(cumulative, number)
    for index, row in enumerate(rows):
        if row.temperature == 0:
            tokens[index, 0] = scaled[index].argmax()
        elif not row.plain:
            kept = _truncate(mass[index], top_k=row.top_k, top_p=row.top_p, min_p=row.min_p)
            tokens[index] = _invert(kept.cumsum(dim=-1)[None], number[index : index + 1])[0]
    return tokens


def _truncate(mass: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The mass of the most likely tokens; the rest 0. Min-p, then top-k, then top-p of the rest."""
    ordered, order = mass.sort(descending=True, stable=True)
    ordered[ordered < min_p * ordered[0]] = 0
    if 0 < top_k < len(ordered):
        ordered[top_k:] = 0
    if top_p < 1:
        before = ordered.cumsum(dim=-1) - ordered
        # The token that crosses the threshold is kept, so at least one is.
        ordered[before >= top_p * ordered.sum()] = 0
    return torch.zeros_like(mass).scatter_(0, order, ordered)
