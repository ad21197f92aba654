"""What a run gives up when state segments are lost."""

from __future__ import annotations

import pytest

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.version_return import batch_attempt, plan_return


def plan(versions: dict[int, bool], **states: bool):
    return plan_return("r", versions=versions, states=states)


def test_nothing_is_given_up_where_everything_is_there():
    assert plan({}) is None
    assert plan({3: False, 4: True}, a=True, b=True) is None


def test_a_lost_gradient_sum_costs_its_policy_alone():
    given_up = plan({4: True}, a=True, b=False)
    assert (given_up.version, given_up.reset, given_up.abandons) == (4, {"b"}, False)


def test_an_older_version_takes_every_policy_with_it():
    given_up = plan({2: False, 3: True, 4: False, 5: False}, a=True, b=False)
    assert (given_up.version, given_up.newest, given_up.reset) == (3, 5, {"a", "b"})
    assert given_up.abandons


def test_before_the_first_commit_policies_begin_anew():
    given_up = plan({}, a=False, b=True)
    assert (given_up.version, given_up.reset, given_up.abandons) == (None, {"a"}, False)


def test_no_version_is_whole():
    with pytest.raises(DomainError, match="no version is whole") as caught:
        plan({0: False, 1: False}, a=False)
    assert caught.value.reason is ErrorReason.SEGMENT_NOT_FOUND


def test_batches_from_a_version_on_are_of_a_further_attempt():
    assert [batch_attempt((3, 1), batch) for batch in range(5)] == [0, 1, 1, 2, 2]
