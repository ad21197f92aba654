"""Estimates go by what ended, and the newest counts most."""

from __future__ import annotations

import pytest

from flexmarl.core.ids import BatchId
from flexmarl.core.policy_training import PolicyRules, Record, RecordStage
from flexmarl.core.run_effects import Bind
from flexmarl.core.training import Training, TrainingRules
from flexmarl.core.training_estimates import SCALING_EFFICIENCY, Estimates, speed
from flexmarl.core.training_rows import Row


def test_more_units_are_faster_with_a_loss_each() -> None:
    assert speed(1) == 1.0
    assert speed(3) == pytest.approx(3 * SCALING_EFFICIENCY**2)


def test_the_rate_is_that_of_one_unit() -> None:
    estimates = Estimates()
    estimates.computed(100, took_s=0.0, units=1)
    estimates.computed(0, took_s=1.0, units=1)
    assert estimates.rate is None
    estimates.computed(180, took_s=1.0, units=2)
    assert estimates.rate == pytest.approx(100.0)
    estimates.computed(200, took_s=1.0, units=1)
    assert estimates.rate == pytest.approx(130.0)


def test_a_swap_is_both_ways() -> None:
    estimates = Estimates()
    estimates.bound(2.0)
    estimates.suspended(1.0)
    assert estimates.swap_s == 3.0
    estimates.bound(4.0)
    assert estimates.bind_s == pytest.approx(2.6)
    estimates.suspended(0.0)
    assert estimates.suspend_s == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("rates", "first"),
    [
        ({}, "c"),  # all have the default: who has most tokens
        ({"a": 100.0}, "c"),  # the others' is 100, too: still who has most tokens
        ({"a": 100.0, "c": 300.0}, "b"),  # 300 / 200 s are longer than 100 / 100 and 400 / 300
        ({"a": 100.0, "b": 600.0}, "c"),  # 400 / 350
        ({"a": 10.0}, "c"),  # by the default, 400 / 1000 s would be less than 100 / 10
        ({"a": 10.0, "b": 10.0, "c": 100.0}, "b"),
    ],
)
def test_who_was_never_seen_computing_has_the_others_mean_rate(
    rates: dict[str, float], first: str
) -> None:
    tokens = {"a": 100, "b": 300, "c": 400}
    training = Training(TrainingRules(policies={name: PolicyRules() for name in tokens}))
    training.begin_batch(BatchId(0))
    training.trainer_opened("t0", ("slot0",))
    for name, count in tokens.items():
        row = Row(
            vertex_id=name, sample_id="s", agent="x", policy=name, path="0:0",
            num_response_tokens=count,
        )  # fmt: skip
        policy = training.policies[name]
        policy.has_state = policy.subgraph_closed = True
        policy.records["m"] = Record("m", (row,), RecordStage.READY)
        policy.estimates.rate = rates.get(name)
    binds = [e for e in training.due(version=0, now=0.0) if isinstance(e, Bind)]
    assert [bind.policy for bind in binds] == [first]
