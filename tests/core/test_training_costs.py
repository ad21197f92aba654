from __future__ import annotations

import pytest

from flexmarl.core.errors import DomainError
from flexmarl.core.training_costs import PolicyCosts, TrainingCosts

COSTS = TrainingCosts(
    policies={
        "large": PolicyCosts(params_b=32, tokens_per_s=1050),
        "small": PolicyCosts(params_b=10, tokens_per_s=3300),
    },
    scaling_efficiency=0.9,
    swap_out_s_per_b=0.12,
    swap_in_s_per_b=0.22,
    apply_s_per_b=0.07,
    publish_s_per_b=0.14,
)


@pytest.mark.parametrize(("units", "speedup"), [(1, 1.0), (2, 1.8), (4, 4 * 0.729)])
def test_units_share_a_micro_batch_and_lose_some_of_their_speed(units: int, speedup: float) -> None:
    seconds = COSTS.gradients_s("large", num_tokens=21_000, num_units=units)
    assert seconds == pytest.approx(20.0 / speedup)


@pytest.mark.parametrize(
    ("held", "seconds"),
    [(None, 0.22 * 32), ("small", 0.12 * 10 + 0.22 * 32)],
)
def test_a_unit_moves_out_what_it_held(held: str | None, seconds: float) -> None:
    assert COSTS.take_s("large", held=held) == pytest.approx(seconds)


def test_update_and_publication_cost_by_size() -> None:
    assert COSTS.apply_s("small") == pytest.approx(0.7)
    assert COSTS.publish_s("large") == pytest.approx(0.14 * 32)


def test_a_policy_without_costs_is_named() -> None:
    with pytest.raises(DomainError, match=r"'other'.*large, small"):
        COSTS.apply_s("other")
