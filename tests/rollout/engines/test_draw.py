import math
import random

import pytest
import torch

from flexmarl.rollout.engines.draw import draw, row_sampling

FULL = row_sampling(temperature=1.0, top_k=0, top_p=1.0)


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    rng = random.Random(1)
    n = 20_000
    drawn = draw(logits.expand(n, 4), [FULL] * n, [rng.random() for _ in range(n)])
    expected = logits[0].double().softmax(-1)
    for token in range(4):
        share = drawn.tokens.count(token) / n
        assert abs(share - expected[token]) < 0.012
    assert drawn.logprobs[0] == pytest.approx(expected[drawn.tokens[0]].log().item(), abs=1e-12)


def test_tokens_without_mass_are_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(4, 5)
    drawn = draw(logits, [FULL] * 4, [0.0, 0.499999, 0.5, 1 - 2**-53])
    assert drawn.tokens == [1, 1, 3, 3]


def test_temperature_scales_draw_and_logprob():
    logits = torch.randn(1, 9)
    row = row_sampling(temperature=0.5, top_k=0, top_p=1.0)
    drawn = draw(logits, [row], [0.3])
    expected = (logits.double() / 0.5).log_softmax(-1)[0, drawn.tokens[0]].item()
    assert drawn.logprobs[0] == pytest.approx(expected, abs=1e-12)


def test_greedy_rows_take_the_largest_and_report_temperature_one():
    logits = torch.randn(3, 9)
    greedy = row_sampling(temperature=0.0, top_k=0, top_p=1.0)
    drawn = draw(logits, [greedy, FULL, greedy], [0.99, 0.2, 0.0])
    assert drawn.tokens[0] == logits[0].argmax() and drawn.tokens[2] == logits[2].argmax()
    expected = logits[0].double().log_softmax(-1).max().item()
    assert drawn.logprobs[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (2, 1.0, 0, {3, 1}),
        (0, 0.6, 0, {3}),
        (0, 0.7, 0, {3, 1}),
        (3, 0.7, 0, {3, 1}),
        (0, 1.0, 0.1, {3, 1}),
        (0, 1.0, 0.05, {3, 1, 0, 2}),
        (1, 1.0, 0.05, {3}),
    ],
)
def test_truncation_keeps_the_most_likely(top_k, top_p, min_p, kept):
    logits = torch.tensor([[0.05, 0.25, 0.05, 0.6499, 0.0001]]).log()
    row = row_sampling(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    uniforms = [k / 200 for k in range(200)]
    drawn = draw(logits.expand(200, 5), [row] * 200, uniforms)
    assert set(drawn.tokens) == kept
    # Log-probs stay those of the full vocabulary: the trainer computes the same.
    for token, logprob in zip(drawn.tokens, drawn.logprobs, strict=True):
        assert logprob == pytest.approx(logits[0, token].item(), abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_says_so_and_spoils_no_other(bad):
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    drawn = draw(logits, [FULL] * 3, [0.5] * 3)
    assert math.isnan(drawn.logprobs[1])
    assert drawn.logprobs[0] == drawn.logprobs[2] == pytest.approx(math.log(0.2))
