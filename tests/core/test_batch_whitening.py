"""Advantages whitened over a batch: no group closes before the last one is known."""

from __future__ import annotations

import math

import pytest
from core.test_batch import batch, end, row

from flexmarl.core.advantages import AdvantageRule
from flexmarl.core.batch import BatchGroups
from flexmarl.core.run_effects import AdmitGroups, CloseGroup, ReadRows
from flexmarl.core.run_events import StoredGroup
from flexmarl.core.states import GroupStatus, SampleStatus

RULE = AdvantageRule(estimator="reinforce_pp", normalize_std=False)
THIRD = math.sqrt(1 / 3)


def finish(groups: BatchGroups, group: int) -> None:
    """Both samples of a group succeed, and its rows are read."""
    ids = [end(groups, ordinal, SampleStatus.DONE, group=group) for ordinal in range(2)]
    assert [type(effect) for effect in groups.due()] == [ReadRows]
    groups.rows_read(f"b000000a0-g{group:04d}", tuple(row(sample_id) for sample_id in ids))


def advantages(effects: list[object]) -> list[float]:
    closures = [effect for effect in effects if isinstance(effect, CloseGroup)]
    assert len(closures) == len(effects)
    return [item.advantage for closure in closures for item in closure.released]


def test_groups_close_together_when_the_last_one_is_known() -> None:
    groups = batch(num_groups=2, advantage=RULE)
    finish(groups, 0)
    assert groups.due() == []
    assert not groups.all_terminal
    finish(groups, 1)
    closures = groups.due()
    # Rewards 0, 1 in both groups: mean 1/2, variance 1/3.
    assert advantages(closures) == pytest.approx([-0.5 / THIRD, 0.5 / THIRD] * 2, abs=1e-6)
    for closure in closures:
        assert isinstance(closure, CloseGroup)
        groups.closed(closure)
    assert groups.due() == []
    assert groups.all_terminal


def test_a_replacement_belongs_to_the_batch_too() -> None:
    groups = batch(num_groups=2, advantage=RULE, on_sample_failure="drop_sample", replace_max=1)
    finish(groups, 0)
    for ordinal in range(2):
        end(groups, ordinal, SampleStatus.FAILED, group=1)
    assert [type(effect) for effect in groups.due()] == [ReadRows]
    groups.rows_read("b000000a0-g0001", ())
    (dropped,) = groups.due()
    assert isinstance(dropped, CloseGroup)
    assert dropped.status is GroupStatus.DROPPED
    groups.closed(dropped)
    (admit,) = groups.due()
    assert isinstance(admit, AdmitGroups)
    groups.admitted(admit.groups)
    assert groups.due() == []
    finish(groups, 2)
    assert len(advantages(groups.due())) == 4


def test_groups_that_were_closed_before_a_crash_take_part() -> None:
    groups = batch(num_groups=2, advantage=RULE)
    finish(groups, 0)
    finish(groups, 1)
    first, second = groups.due()
    assert isinstance(first, CloseGroup)
    assert isinstance(second, CloseGroup)

    again = batch(num_groups=2, advantage=RULE)
    specs = [group.spec for group in again.groups.values()]
    again.groups.clear()
    facts = [fact for group in groups.groups.values() for fact in group.samples.values()]
    rows = tuple(item.row for item in first.released)
    again.restore(
        [
            StoredGroup(spec=specs[0], status=GroupStatus.CLOSED, rows=rows),
            StoredGroup(spec=specs[1], status=GroupStatus.OPEN),
        ],
        facts,
    )
    assert [type(effect) for effect in again.due()] == [ReadRows]
    again.rows_read(second.group_id, tuple(item.row for item in second.released))
    assert again.due() == [second]
