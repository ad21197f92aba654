"""Estimates go by what ended, and the newest counts most."""

from __future__ import annotations

import pytest

from flexmarl.core.training_estimates import SCALING_EFFICIENCY, Estimates, speed


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
