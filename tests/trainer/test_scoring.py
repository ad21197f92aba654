"""Log-probabilities, entropies and losses in tiles: values, gradients, memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from flexmarl.trainer.rank import scoring
from flexmarl.trainer.rank.scoring import Scored, score, scored_loss


def case(
    tokens: int,
    width: int,
    vocab: int,
    dtype: torch.dtype = torch.float64,
    *,
    score_dtype: torch.dtype = torch.float64,
    biased: bool = True,
) -> Scored:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    return Scored(
        hidden=draw(tokens, width),
        weight=draw(vocab, width),
        bias=draw(vocab) if biased else None,
        targets=torch.randint(0, vocab, (tokens,), generator=generator),
        temperatures=torch.rand(tokens, generator=generator) + 0.5,
        dtype=score_dtype,
    )


def leaves(scored: Scored) -> list[torch.Tensor]:
    parts = (scored.hidden, scored.weight, scored.bias)
    return [leaf for leaf in parts if leaf is not None and leaf.requires_grad]


def plainly(scored: Scored) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(scored.hidden, scored.weight, scored.bias)
    logs = torch.log_softmax(logits.to(scored.dtype) / scored.temperatures[:, None], -1)
    return logs.gather(1, scored.targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def row_loss(chosen: torch.Tensor, entropies: torch.Tensor, *, entropy: bool) -> torch.Tensor:
    """A loss of one row in which each token's weight depends on all the row's tokens."""
    total = (chosen * chosen.sum().detach().sin() * torch.arange(len(chosen))).sum()
    return total + (entropies.square().sum() if entropy else 0.0)


def rows_of(tile, row_ends):
    starts = (0, *row_ends)[tile.first_row : tile.first_row + tile.num_rows + 1]
    return [slice(start - tile.start, end - tile.start) for start, end in pairwise(starts)]


def tiled(scored: Scored, row_ends, *, entropy: bool, tiles: list | None = None) -> torch.Tensor:
    def loss(tile, chosen, entropies):
        assert len(chosen) == tile.end - tile.start
        if tiles is not None:
            tiles.append(tile)
        return sum(
            row_loss(chosen[row], entropies[row], entropy=entropy)
            for row in rows_of(tile, row_ends)
        )

    return scored_loss(scored, loss, row_ends=row_ends, entropy=entropy)


ROWS = {  # where rows end, of 8 tokens, and how many tiles of 3 tokens they make
    "short": ((1, 2, 3, 5, 6, 8), 3),
    "one longer than two chunks": ((1, 8), 2),
    "one of nothing": ((2, 2, 8), 2),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_tiles_give_what_the_whole_gives(monkeypatch, rows, entropy, biased):
    monkeypatch.setattr(scoring, "LOGITS_PER_CHUNK", 3 * 11 + 10)
    row_ends, num_tiles = ROWS[rows]
    scored = case(8, 5, 11, biased=biased)
    chosen, entropies = plainly(scored)
    whole = sum(
        row_loss(chosen[start:end], entropies[start:end], entropy=entropy)
        for start, end in pairwise((0, *row_ends))
    )
    tiles: list = []
    got = tiled(scored, row_ends, entropy=entropy, tiles=tiles)
    assert len(tiles) == num_tiles
    assert torch.allclose(got, whole, rtol=1e-12, atol=1e-12)
    for expected, gradient in zip(
        torch.autograd.grad(2.0 * whole, leaves(scored)),
        torch.autograd.grad(2.0 * got, leaves(scored)),
        strict=True,
    ):
        assert torch.allclose(expected, gradient, rtol=1e-12, atol=1e-12)


def test_scores_are_those_of_the_whole_and_carry_no_gradient(monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_PER_CHUNK", 3 * 11)
    scored = case(8, 5, 11)
    for expected, got in zip(plainly(scored), score(scored), strict=True):
        assert torch.allclose(expected, got, rtol=1e-12, atol=1e-12)
        assert not got.requires_grad


def test_a_frozen_head_costs_no_gradient():
    scored = case(4, 3, 7, biased=False)
    scored.weight.requires_grad_(False)
    tiled(scored, (2, 4), entropy=False).backward()
    assert scored.weight.grad is None
    assert scored.hidden.grad is not None


def test_bfloat16_heads_are_summed_in_float32():
    scored = case(64, 16, 50, torch.bfloat16, score_dtype=torch.float32, biased=False)
    total = tiled(scored, (64,), entropy=True)
    assert total.dtype == torch.float32
    total.backward()
    whole = row_loss(*plainly(scored), entropy=True)
    expected = torch.autograd.grad(whole, leaves(scored))
    for leaf, gradient in zip(leaves(scored), expected, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.bfloat16
        gap = (leaf.grad.float() - gradient.float()).norm() / gradient.float().norm()
        assert gap < 0.02


@pytest.mark.parametrize("row_ends", [(256,), tuple(range(64, 257, 64))])
def test_logits_are_never_whole_in_memory(monkeypatch, row_ends):
    """The largest tensor of forward and backward is a chunk, not [tokens, vocabulary]."""
    tokens, vocab = 256, 1 << 15
    monkeypatch.setattr(scoring, "LOGITS_PER_CHUNK", 1 << 22)
    scored = case(tokens, 4, vocab, torch.float32, score_dtype=torch.float32, biased=False)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        tiled(scored, row_ends, entropy=True).backward()
    assert largest <= scoring.LOGITS_PER_CHUNK
    assert largest < tokens * vocab
