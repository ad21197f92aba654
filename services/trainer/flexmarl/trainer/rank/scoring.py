"""Log-probabilities and entropies of sampled tokens, and the loss of them, at the output head.

[tokens, vocabulary] is made a few tokens at a time. A loss needs nothing beyond a row to know what
each of its tokens weighs, so the gradient of a tile of whole rows is formed while its logits are
there: they are made once, where a recorded graph, or one that makes them again for its backward,
needs the head's product twice. A row of more tokens than a chunk has its logits made again, but
for its last chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable

from flexmarl.core.passes import Tile, cut_tiles

LOGITS_PER_CHUNK: Final = 1 << 24
"""Most logits alive at once; beside them lie as many powers of e."""

TileLoss = Callable[[Tile, torch.Tensor, torch.Tensor], torch.Tensor]
"""Unnormalised loss, a scalar, of a tile's tokens from their log-probabilities and entropies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What the output head reads, and of which tokens.

    Attributes:
        hidden: Hidden states [tokens, width].
        weight: Output head [vocabulary, width].
        bias: Its bias [vocabulary]; None without one.
        targets: Sampled tokens [tokens].
        temperatures: Sampling temperature of each token [tokens].
        dtype: Dtype of logits and of everything made of them.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    temperatures: torch.Tensor
    dtype: torch.dtype

    @property
    def tokens_per_chunk(self) -> int:
        """Most tokens whose logits are alive at once."""
        return max(1, LOGITS_PER_CHUNK // self.weight.shape[0])


def score(scored: Scored) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (log-probabilities, entropies) of the targets [tokens], without a gradient."""
    with torch.no_grad():
        chunks = [_Chunk(scored, part) for part in _parts(0, len(scored.hidden), scored)]
        return (
            torch.cat([chunk.chosen for chunk in chunks]),
            torch.cat([chunk.entropies for chunk in chunks]),
        )


def scored_loss(
    scored: Scored, loss: TileLoss, *, row_ends: Sequence[int], entropy: bool
) -> torch.Tensor:
    """Returns the sum of the loss over all tokens; it carries the gradient, formed already.

    Args:
        scored: Tokens, row after row.
        loss: Called once with every tile, in order.
        row_ends: Where each row's tokens end.
        entropy: Whether the loss's gradient goes through the entropies, too.
    """
    tiles = cut_tiles(row_ends, max_tokens=scored.tokens_per_chunk)
    total: torch.Tensor = _ScoredLoss.apply(  # type: ignore[no-untyped-call]
        scored.hidden, scored.weight, scored.bias, scored, loss, tiles, entropy
    )
    return total


class _ScoredLoss(torch.autograd.Function):
    """The forward makes the gradient of its result; the backward scales it."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scored: Scored,
        loss: TileLoss,
        tiles: Sequence[Tile],
        entropy: bool,
    ) -> torch.Tensor:
        needed = ctx.needs_input_grad
        # Sums over chunks are kept in the scores' precision: bfloat16 would lose the small ones.
        gradients = _Gradients(
            hidden=torch.empty_like(hidden),
            weight=torch.zeros_like(weight, dtype=scored.dtype) if needed[1] else None,
            bias=(
                torch.zeros_like(bias, dtype=scored.dtype)
                if bias is not None and needed[2]
                else None
            ),
        )
        total = torch.zeros((), dtype=scored.dtype, device=hidden.device)
        for tile in tiles:
            total += _tile(scored, tile, loss, entropy, gradients)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        of_total: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        return (
            hidden * of_total,
            None if weight is None else weight.mul_(of_total).to(ctx.dtype),
            None if bias is None else bias.mul_(of_total).to(ctx.dtype),
            None,
            None,
            None,
            None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradients:
    """What tiles add to: of the hidden states, and of a head that is trained."""

    hidden: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class _Chunk:
    """Some tokens' scores, with p = softmax(z) and H the entropy of p.

    z = (h W^T + b) / temperature
    chosen = z_target - log sum exp z, d chosen / dz_j = [j = target] - p_j
    H = log sum exp z - sum p z, dH / dz_j = -p_j (log p_j + H)
    """

    def __init__(self, scored: Scored, part: slice) -> None:
        self._scored, self._part = scored, part
        self._scale = scored.temperatures[part].to(scored.dtype).reciprocal()
        logits = torch.nn.functional.linear(scored.hidden[part], scored.weight, scored.bias)
        self._logits = logits.to(scored.dtype).mul_(self._scale[:, None])
        self._powers = self._logits.sub_(self._logits.amax(-1, keepdim=True)).exp()
        self._mass = self._powers.sum(-1)
        self._log_mass = self._mass.log()
        targets = scored.targets[part, None]
        self.chosen = self._logits.gather(1, targets)[:, 0] - self._log_mass
        self.entropies = (
            self._log_mass - torch.linalg.vecdot(self._powers, self._logits) / self._mass
        )

    def add_to(
        self, gradients: _Gradients, of_chosen: torch.Tensor, of_entropy: torch.Tensor | None
    ) -> None:
        """Adds what the two gradients [tokens] come to; logits and powers are used up by it."""
        scored, part = self._scored, self._part
        each = self._scale / self._mass
        if of_entropy is None:
            low = self._powers.mul_((-of_chosen * each)[:, None])
        else:
            logs = self._logits.add_((self.entropies - self._log_mass)[:, None])
            logs.mul_(of_entropy[:, None]).add_(of_chosen[:, None])
            low = self._powers.mul_(logs).mul_(-each[:, None])
        low.scatter_add_(1, scored.targets[part, None], (of_chosen * self._scale)[:, None])
        if gradients.bias is not None:
            gradients.bias.add_(low.sum(0))
        low = low.to(scored.hidden.dtype)
        torch.mm(low, scored.weight, out=gradients.hidden[part])
        if gradients.weight is not None:
            _add_product(gradients.weight, low, scored.hidden[part])


def _tile(
    scored: Scored, tile: Tile, loss: TileLoss, entropy: bool, gradients: _Gradients
) -> torch.Tensor:
    """Returns the loss of a tile, and adds its gradient."""
    parts = _parts(tile.start, tile.end, scored)
    chunk: _Chunk | None = None
    chosen, entropies = [], []
    for part in parts:
        chunk = None  # before the next one's logits are made
        chunk = _Chunk(scored, part)
        chosen.append(chunk.chosen)
        entropies.append(chunk.entropies)
    leaves = (torch.cat(chosen).requires_grad_(), torch.cat(entropies).requires_grad_(entropy))
    with torch.enable_grad():
        total = loss(tile, *leaves)
        found = torch.autograd.grad(total, leaves if entropy else leaves[:1])
    for part in reversed(parts):
        if chunk is None:
            chunk = _Chunk(scored, part)
        of_tokens = slice(part.start - tile.start, part.stop - tile.start)
        chunk.add_to(
            gradients,
            found[0][of_tokens],
            found[1][of_tokens] if entropy else None,
        )
        chunk = None
    return total.detach()


def _parts(start: int, end: int, scored: Scored) -> list[slice]:
    tokens = scored.tokens_per_chunk
    return [slice(first, min(end, first + tokens)) for first in range(start, end, tokens)]


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left^T right."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    else:
        total.add_(left.T @ right)
