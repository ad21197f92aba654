"""How groups end."""

from __future__ import annotations

import pytest

from flexmarl.core.closure import (
    CancelRest,
    Close,
    ClosureRules,
    Drop,
    Fail,
    FailureWatch,
    Refill,
    Wait,
    decide_group,
    may_replace,
    redundant_ordinals,
)
from flexmarl.core.states import SampleStatus

D, F, RUN, C, S = (
    SampleStatus.DONE,
    SampleStatus.FAILED,
    SampleStatus.OPEN,
    SampleStatus.CANCELLED,
    SampleStatus.SUPERSEDED,
)

CASES = [
    ("refill", 2, [D, D, D], Close),
    ("refill", 2, [D, RUN, D], Wait),
    ("refill", 2, [D, F, RUN], Refill),
    ("refill", 2, [D, F, D, D], Close),
    ("refill", 2, [D, F, D, F, F], Close),
    ("refill", 2, [D, F, F, F, F], Drop),
    ("refill", 0, [D, D, F], Close),
    ("refill", 0, [D, RUN, F], Wait),
    ("drop_sample", 9, [D, D, F], Close),
    ("drop_sample", 9, [D, D, C], Close),
    ("drop_sample", 9, [D, F, F], Drop),
    ("drop_sample", 9, [D, F, RUN], Wait),
    ("drop_group", 9, [D, D, F], Drop),
    ("drop_group", 9, [D, RUN, F], CancelRest),
    ("drop_group", 9, [D, RUN, RUN], Wait),
    ("drop_group", 9, [D, S, C], Drop),
    ("fail", 9, [D, RUN, F], Fail),
    ("fail", 9, [D, D, D], Close),
]


@pytest.mark.parametrize(("policy", "refill_max", "statuses", "expected"), CASES)
def test_decisions(policy, refill_max, statuses, expected) -> None:
    rules = ClosureRules(on_sample_failure=policy, refill_max=refill_max)
    got = decide_group(dict(enumerate(statuses)), num_wanted=3, rules=rules)
    assert isinstance(got, expected)


def test_refills_count_on_and_are_bounded() -> None:
    rules = ClosureRules(refill_max=2)
    got = decide_group({0: F, 1: F, 2: F}, num_wanted=3, rules=rules)
    assert isinstance(got, Refill)
    assert got.ordinals == (3, 4)


REDUNDANT_CASES = [
    ("refill", [D, D, RUN, RUN, RUN], Wait),
    ("refill", [D, RUN, D, D, RUN], CancelRest),
    ("refill", [D, C, D, D, C], Close),
    ("refill", [D, D, D, D, RUN], CancelRest),
    ("refill", [D, F, F, D, D], Close),  # the spare ones stood in for the failed ones
    ("refill", [D, F, F, F, D], Refill),
    ("fail", [D, C, D, D, C], Close),  # cut, not failed
    ("drop_group", [D, C, D, D, C], Close),
    ("drop_group", [D, F, RUN, D, RUN], CancelRest),
]


@pytest.mark.parametrize(("policy", "statuses", "expected"), REDUNDANT_CASES)
def test_decisions_with_two_redundant_samples(policy, statuses, expected) -> None:
    rules = ClosureRules(on_sample_failure=policy, redundant_samples=2)
    got = decide_group(dict(enumerate(statuses)), num_wanted=3, rules=rules)
    assert isinstance(got, expected)


def test_the_redundant_ones_are_those_cut_and_those_done_beyond_what_is_wanted() -> None:
    rules = ClosureRules(redundant_samples=2)
    samples = dict(enumerate([D, C, D, D, D]))
    assert redundant_ordinals(samples, num_wanted=3, rules=rules) == {1, 4}
    assert redundant_ordinals(samples, num_wanted=5, rules=rules) == frozenset()
    assert redundant_ordinals(samples, num_wanted=3, rules=ClosureRules()) == frozenset()


def test_a_group_of_one_closes_with_one() -> None:
    assert isinstance(decide_group({0: D}, num_wanted=1, rules=ClosureRules()), Close)


def test_replacements_are_bounded() -> None:
    rules = ClosureRules(replace_max=1)
    assert may_replace(replaced=0, rules=rules)
    assert not may_replace(replaced=1, rules=rules)


def test_unlucky_samples_are_not_a_broken_run() -> None:
    watch = FailureWatch(2)
    assert not watch.is_fatal(failed=True, reason="REWARD_RAISED")
    assert not watch.is_fatal(failed=False, reason="")
    assert not watch.is_fatal(failed=True, reason="REWARD_RAISED")
    assert not watch.is_fatal(failed=True, reason="REWARD_RAISED")


def test_a_whole_group_of_failures_is_the_code() -> None:
    watch = FailureWatch(2)
    assert not watch.is_fatal(failed=True, reason="WORKFLOW_RAISED")
    assert watch.is_fatal(failed=True, reason="WORKFLOW_RAISED")


def test_what_no_sample_can_escape_is_fatal_at_once() -> None:
    assert FailureWatch(8, num_done=99).is_fatal(failed=True, reason="UNKNOWN_AGENT")
