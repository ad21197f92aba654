"""The loss on plain tensors: clipping, correction, aggregation, extreme log-probs (E7, E9)."""

from __future__ import annotations

import math

import pytest
import torch

from flexmarl.core.ledger import Counts
from flexmarl.runtime.run_config import LossConfig
from flexmarl.trainer.rank.losses.base import LossInputs
from flexmarl.trainer.rank.losses.grpo import grpo


def inputs(current, *, behaviour=None, advantage=None, mask=None, rows=None, entropy=None):
    current = torch.tensor(current, dtype=torch.float32, requires_grad=True)
    count = len(current)

    def column(values, default, dtype=torch.float32):
        return torch.tensor(default if values is None else values, dtype=dtype)

    return LossInputs(
        current=current,
        entropy=column(entropy, [0.0] * count),
        behaviour=column(behaviour, [-1.0] * count, torch.float64),
        advantage=column(advantage, [1.0] * count, torch.float64),
        row_tokens=column(rows, [count] * count, torch.int64),
        mask=column(mask, [True] * count, torch.bool),
    )


def gradient(given, **config):
    output = grpo(given, LossConfig(**config), 0.0)
    output.total.backward()
    return output, given.current.grad.tolist()


def test_at_staleness_zero_the_gradient_is_advantage_times_that_of_the_log_probability():
    output, grad = gradient(inputs([-1.0, -2.0], advantage=[0.5, -2.0]))
    assert grad == [-0.5, 2.0]
    assert output.sums["ratio"] == 2.0
    assert output.sums["clipped"] == 0.0


@pytest.mark.parametrize(
    ("current", "advantage", "moves"),
    [(-0.5, 1.0, False), (-0.5, -1.0, True), (-1.5, 1.0, True), (-1.5, -1.0, False)],
)
def test_a_ratio_beyond_the_clip_moves_only_back(current, advantage, moves):
    _, grad = gradient(inputs([current], advantage=[advantage]), old="behaviour")
    assert (grad[0] != 0.0) is moves


def test_the_correction_is_capped_and_detached():
    given = inputs([-0.5, -3.0], behaviour=[-1.0, -1.0])
    _, grad = gradient(given, correction_cap=1.2)
    assert grad == pytest.approx([-1.2, -math.exp(-2.0)])


def test_aggregations_weigh_tokens_and_name_their_denominator():
    given = inputs([-1.0] * 4, rows=[1, 3, 3, 3])
    assert gradient(given, aggregation="token_mean")[1] == [-1.0] * 4
    given = inputs([-1.0] * 4, rows=[1, 3, 3, 3])
    assert gradient(given, aggregation="seq_mean")[1] == pytest.approx([-1.0] + [-1 / 3] * 3)
    counts = Counts(num_rows=2, num_tokens=4)
    assert counts.denominator("token_mean") == 4.0
    assert counts.denominator("seq_mean") == 2.0


@pytest.mark.parametrize("old", ["proximal", "behaviour"])
@pytest.mark.parametrize("extreme", [-200.0, -1e30])
def test_extreme_log_probs_keep_value_and_gradient_finite(old, extreme):
    for current, behaviour in ((extreme, 0.0), (0.0, extreme)):
        given = inputs([current, -1.0], behaviour=[behaviour, -1.0], advantage=[-1.0, 1.0])
        output, grad = gradient(given, old=old, correction_cap=5.0)
        assert math.isfinite(output.total.item())
        assert all(math.isfinite(value) for value in grad)


def test_a_masked_token_gives_nothing_however_extreme():
    given = inputs(
        [-1.0, 500.0], behaviour=[-1.0, -math.inf], mask=[True, False], advantage=[2.0, 9.0]
    )
    output, grad = gradient(given, old="behaviour", correction_cap=3.0)
    assert grad == [-2.0, 0.0]
    assert output.total.item() == -2.0
    assert output.maxima["logprob_gap_max"].item() == 0.0


def test_the_entropy_bonus_shares_the_aggregation():
    given = inputs([-1.0] * 3, entropy=[1.0, 2.0, 4.0], advantage=[0.0] * 3, rows=[1, 2, 2])
    assert grpo(given, LossConfig(), 0.5).total.item() == -3.5
    assert grpo(given, LossConfig(aggregation="seq_mean"), 0.5).total.item() == -2.0
