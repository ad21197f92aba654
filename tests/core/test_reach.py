"""When a policy can still be reached within a batch, case by case."""

from __future__ import annotations

import pytest
from core.test_batch import batch, closure_of, end

from flexmarl.core.batch import BatchGroups
from flexmarl.core.closure import ClosureRules
from flexmarl.core.ids import SampleId
from flexmarl.core.reach import group_reaches
from flexmarl.core.states import SampleStatus
from flexmarl.core.training_rows import SampleFact

ID = SampleId.parse("b000000a0-g0000-s000a0")
FIXED = ClosureRules(on_sample_failure="drop_sample", replace_max=0)


def fact(status: str, *, left: str = "", used: str = "") -> SampleFact:
    return SampleFact(
        sample_id=ID,
        status=SampleStatus(status),
        left=frozenset(left.split()),
        used=frozenset(used.split()),
    )


CASES = [
    # An open sample reaches what it has not left, and what it has used waits for its group's end.
    ([fact("open")], FIXED, True),
    ([fact("open", left="q")], FIXED, True),
    ([fact("open", left="p")], FIXED, False),
    ([fact("open", left="p q"), fact("open", left="q")], FIXED, True),
    ([fact("open", left="p", used="p")], FIXED, True),
    ([fact("done", used="q"), fact("open", left="p")], FIXED, False),
    ([fact("done", used="p"), fact("open", left="p")], FIXED, True),
    ([fact("failed", used="p"), fact("open", left="p")], FIXED, False),
    # Whoever may come in addition may call anybody.
    ([fact("open", left="p")], ClosureRules(refill_max=1, replace_max=0), True),
    ([fact("open", left="p")], ClosureRules(refill_max=0, replace_max=0), False),
    # Redundant samples are there from the start: they are none of those added.
    (
        [fact("open", left="p")] * 2,
        ClosureRules(redundant_samples=1, refill_max=1, replace_max=0),
        True,
    ),
    ([fact("failed"), *[fact("open", left="p")] * 2], ClosureRules(refill_max=1), True),
    ([fact("open", left="p")], ClosureRules(on_sample_failure="drop_sample", replace_max=1), True),
    # A group whose samples are all done only waits to be closed, or to be filtered and replaced.
    ([fact("done", used="q")], ClosureRules(), False),
    ([fact("done", used="q")], ClosureRules(filter_zero_variance=True), True),
]


@pytest.mark.parametrize(("samples", "rules", "reaches"), CASES)
def test_what_a_group_reaches(samples, rules, reaches) -> None:
    assert group_reaches("p", samples, num_wanted=1, rules=rules, replaced=0) is reaches


def leave(groups: BatchGroups, ordinal: int, *, group: int = 0, attempt: int = 0) -> None:
    sample_id = SampleId.parse(f"b000000a0-g{group:04d}-s{ordinal:03d}a{attempt}")
    left = frozenset({"p"})
    groups.sample_changed(SampleFact(sample_id=sample_id, status=SampleStatus.OPEN, left=left))


def test_a_policy_is_left_when_the_last_open_sample_left_it() -> None:
    groups = batch(2, 2, on_sample_failure="drop_sample", replace_max=0)
    assert not groups.is_left("p")
    for group, ordinal in ((0, 0), (0, 1), (1, 0)):
        leave(groups, ordinal, group=group)
        assert not groups.is_left("p")
    end(groups, 1, SampleStatus.DONE, group=1)
    assert groups.is_left("p")
    assert not groups.is_left("q")


def test_the_next_attempt_of_a_sample_has_left_nothing() -> None:
    groups = batch(1, 2, on_sample_failure="drop_sample", replace_max=0)
    leave(groups, 0)
    leave(groups, 1)
    assert groups.is_left("p")
    end(groups, 1, SampleStatus.SUPERSEDED)
    assert not groups.is_left("p")
    leave(groups, 1, attempt=1)
    assert groups.is_left("p")


def test_a_group_to_come_in_place_of_a_dropped_one_reaches_everything() -> None:
    groups = batch(2, 1, on_sample_failure="drop_sample", replace_max=1)
    for group in (0, 1):
        leave(groups, 0, group=group)
        assert not groups.is_left("p")  # either may still be replaced
    end(groups, 0, SampleStatus.FAILED)
    groups.closed(closure_of(groups))
    (admit,) = groups.due()
    assert not groups.is_left("p")
    groups.admitted(admit.groups)
    leave(groups, 0, group=2)
    assert groups.is_left("p")
