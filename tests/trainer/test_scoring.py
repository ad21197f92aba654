"""Log-probabilities and entropies in chunks: values, gradients, memory."""

from __future__ import annotations

import pytest
import torch

from flexmarl.trainer.rank import scoring
from flexmarl.trainer.rank.scoring import score


def case(tokens: int, width: int, vocab: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden, weight, bias = draw(tokens, width), draw(vocab, width), draw(vocab)
    for tensor in (hidden, weight, bias):
        tensor.requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    return hidden, weight, bias, targets, torch.rand(tokens, generator=generator) + 0.5


def plainly(hidden, weight, bias, targets, temperatures):
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperatures[:, None]
    logs = torch.log_softmax(logits, -1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_chunks_give_what_the_whole_gives(monkeypatch, entropy, biased):
    monkeypatch.setattr(scoring, "LOGITS_PER_CHUNK", 3 * 11)
    hidden, weight, bias, targets, temperatures = case(8, 5, 11)
    bias = bias if biased else None
    results = []
    for function in (plainly, score):
        if function is score:
            chosen, entropies = score(
                hidden, weight=weight, bias=bias, targets=targets, temperatures=temperatures,
                dtype=torch.float64, entropy=entropy,
            )  # fmt: skip
        else:
            chosen, entropies = plainly(hidden, weight, bias, targets, temperatures)
        total = (chosen * torch.arange(8.0)).sum()
        if entropy:
            total = total + (entropies * torch.arange(8.0).flip(0)).sum()
        leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
        results.append([chosen, entropies, *torch.autograd.grad(total, leaves)])
    for expected, got in zip(*results, strict=True):
        assert torch.allclose(expected, got, rtol=1e-12, atol=1e-12)
    assert results[1][1].requires_grad is entropy


def test_a_frozen_head_costs_no_gradient():
    hidden, weight, _, targets, temperatures = case(4, 3, 7)
    weight.requires_grad_(False)
    chosen, _ = score(
        hidden, weight=weight, bias=None, targets=targets, temperatures=temperatures,
        dtype=torch.float64, entropy=False,
    )  # fmt: skip
    chosen.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_bfloat16_heads_are_summed_in_float32():
    hidden, weight, _, targets, temperatures = case(64, 16, 50, torch.bfloat16)
    chosen, entropies = score(
        hidden, weight=weight, bias=None, targets=targets, temperatures=temperatures,
        dtype=torch.float32, entropy=True,
    )  # fmt: skip
    assert chosen.dtype == torch.float32
    (chosen.sum() + entropies.sum()).backward()
    expected = [leaf.detach().float().requires_grad_() for leaf in (hidden, weight)]
    whole = plainly(expected[0], expected[1], None, targets, temperatures)
    (whole[0].sum() + whole[1].sum()).backward()
    for got, leaf in zip((hidden, weight), expected, strict=True):
        assert got.grad.dtype == torch.bfloat16
        gap = (got.grad.float() - leaf.grad).norm() / leaf.grad.norm()
        assert gap < 0.02


def test_logits_are_never_whole_in_memory():
    """The largest tensor of forward and backward is a chunk, not [tokens, vocabulary]."""
    tokens, vocab = 256, 1 << 15
    hidden, weight, _, targets, temperatures = case(tokens, 4, vocab, torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        chosen, entropies = score(
            hidden, weight=weight, bias=None, targets=targets, temperatures=temperatures,
            dtype=torch.float32, entropy=True,
        )  # fmt: skip
        (chosen.sum() + entropies.sum()).backward()
    assert largest <= scoring.LOGITS_PER_CHUNK
    assert largest < tokens * vocab
