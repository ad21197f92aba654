"""The rollout side of a batch: what leaves it, what comes in its place, what is left over."""

from __future__ import annotations

from typing import Any

from flexmarl.core.advantages import AdvantageRule
from flexmarl.core.batch import BatchGroups
from flexmarl.core.batch_rules import BatchRules
from flexmarl.core.closure import ClosureRules, FailureWatch
from flexmarl.core.ids import BatchId, GroupId, SampleId
from flexmarl.core.run_effects import (
    AdmitGroups,
    CancelSamples,
    CloseGroup,
    GroupSpec,
    ReadRows,
)
from flexmarl.core.run_events import StoredGroup
from flexmarl.core.states import GroupStatus, SampleStatus, VoidReason
from flexmarl.core.training_rows import Rewards, Row, RunFailure, SampleFact

RAISED = RunFailure(reason="WORKFLOW_RAISED", message="ValueError: no")


PLAIN = AdvantageRule(normalize_std=False)


def new_batch(
    num_groups: int = 1, samples: int = 2, advantage: AdvantageRule = PLAIN, **closure: Any
) -> BatchGroups:
    return BatchGroups(
        BatchId(0),
        BatchRules(
            num_groups=num_groups,
            samples_per_group=samples,
            closure=ClosureRules(**closure),
            advantage=advantage,
        ),
        query_at=lambda ordinal: 100 + ordinal,
        watch=FailureWatch(99),
    )


def batch(num_groups: int = 1, samples: int = 2, **closure: Any) -> BatchGroups:
    groups = new_batch(num_groups, samples, **closure)
    (admit,) = groups.due()
    assert isinstance(admit, AdmitGroups)
    groups.admitted(admit.groups)
    return groups


def end(
    groups: BatchGroups, ordinal: int, status: SampleStatus, *, group: int = 0, attempt: int = 0
) -> SampleId:
    sample_id = SampleId.parse(f"b000000a0-g{group:04d}-s{ordinal:03d}a{attempt}")
    groups.sample_changed(
        SampleFact(
            sample_id=sample_id,
            status=status,
            rewards=Rewards(team=float(ordinal)) if status is SampleStatus.DONE else None,
            failure=RAISED if status is SampleStatus.FAILED else None,
        )
    )
    return sample_id


def row(sample_id: SampleId, **more: Any) -> Row:
    return Row(
        vertex_id=f"{sample_id}/0:0",
        sample_id=str(sample_id),
        agent="solver",
        policy="p",
        path="0:0",
        **more,
    )


def closure_of(groups: BatchGroups, *rows: Row, group: int = 0) -> CloseGroup:
    read = groups.due()
    assert [type(effect) for effect in read] == [ReadRows]
    groups.rows_read(f"b000000a0-g{group:04d}", rows)
    (close,) = groups.due()
    assert isinstance(close, CloseGroup)
    return close


def test_a_group_closes_when_its_last_sample_ends() -> None:
    groups = batch()
    assert [str(s) for s in groups.take_startable()] == [
        "b000000a0-g0000-s000a0",
        "b000000a0-g0000-s001a0",
    ]
    first = end(groups, 0, SampleStatus.DONE)
    assert groups.due() == []
    assert (groups.num_samples, groups.num_samples_ended) == (2, 1)
    second = end(groups, 1, SampleStatus.DONE)
    close = closure_of(groups, row(first), row(second))
    assert close.status is GroupStatus.CLOSED
    assert [item.advantage for item in close.released] == [-0.5, 0.5]
    assert not groups.all_terminal
    assert groups.closed(close) == (row(first), row(second))
    assert groups.due() == []
    assert groups.all_terminal


def test_rows_of_failed_and_superseded_samples_are_void() -> None:
    groups = batch(on_sample_failure="drop_sample", samples=3)
    dead = end(groups, 0, SampleStatus.SUPERSEDED)
    assert str(groups.take_startable()[-1]) == "b000000a0-g0000-s000a1"
    alive = [end(groups, 0, SampleStatus.DONE, attempt=1), end(groups, 1, SampleStatus.DONE)]
    failed = end(groups, 2, SampleStatus.FAILED)
    close = closure_of(
        groups, row(dead), *map(row, alive), row(failed), row(failed, trainable=False)
    )
    assert [(v.row.sample_id, v.reason) for v in close.voided] == [
        (str(dead), VoidReason.REPLAY_DIVERGED),
        (str(failed), VoidReason.SAMPLE_FAILED),
    ]
    assert len(close.released) == 2


def test_a_sample_that_is_done_without_rewards_has_no_reward() -> None:
    groups = batch()
    ids = [SampleId.parse(f"b000000a0-g0000-s{i:03d}a0") for i in range(2)]
    for sample_id in ids:
        groups.sample_changed(SampleFact(sample_id=sample_id, status=SampleStatus.DONE))
    close = closure_of(groups, *map(row, ids))
    assert {v.reason for v in close.voided} == {VoidReason.NO_REWARD}


def test_news_that_is_no_news_is_left_aside() -> None:
    groups = batch()
    end(groups, 0, SampleStatus.DONE)
    end(groups, 0, SampleStatus.FAILED)  # a terminal state is final
    end(groups, 0, SampleStatus.DONE, group=7)  # of no group of this batch
    end(groups, 1, SampleStatus.OPEN)
    groups.groups["b000000a0-g0000"].begin((1,), attempt=1)
    end(groups, 1, SampleStatus.SUPERSEDED)  # told late: its next attempt runs already
    assert groups.groups["b000000a0-g0000"].current == {
        0: SampleStatus.DONE,
        1: SampleStatus.OPEN,
    }


def test_a_dropped_group_is_replaced_by_the_next_query() -> None:
    groups = batch(on_sample_failure="drop_sample", replace_max=1)
    failed = [end(groups, i, SampleStatus.FAILED) for i in range(2)]
    close = closure_of(groups, *map(row, failed))
    assert (close.status, close.drop_reason) == (GroupStatus.DROPPED, VoidReason.GROUP_DROPPED)
    assert {v.reason for v in close.voided} == {VoidReason.SAMPLE_FAILED}
    groups.closed(close)
    (admit,) = groups.due()
    assert isinstance(admit, AdmitGroups)
    assert (admit.groups[0].query_index, admit.groups[0].replaces) == (101, "b000000a0-g0000")
    groups.admitted(admit.groups)
    for i in range(2):
        end(groups, i, SampleStatus.FAILED, group=1)
    groups.closed(closure_of(groups, group=1))
    assert groups.due() == []
    assert groups.all_terminal
    assert groups.failure is None


def test_replacements_go_one_write_at_a_time() -> None:
    groups = batch(num_groups=2, on_sample_failure="drop_sample", samples=1)
    for group in range(2):
        end(groups, 0, SampleStatus.FAILED, group=group)
    groups.due()
    for group in range(2):
        groups.rows_read(f"b000000a0-g{group:04d}", ())
    first, second = groups.due()
    assert isinstance(first, CloseGroup)
    assert isinstance(second, CloseGroup)
    groups.closed(first)
    (admit,) = groups.due()
    groups.closed(second)
    assert groups.due() == []
    assert not groups.all_terminal
    assert isinstance(admit, AdmitGroups)
    groups.admitted(admit.groups)
    (again,) = groups.due()
    assert isinstance(again, AdmitGroups)
    assert again.groups[0].ordinal == 3


def test_without_replacements_left_the_run_may_have_to_fail() -> None:
    groups = batch(
        on_sample_failure="drop_sample", replace_max=0, on_replace_exhausted="fail", samples=1
    )
    end(groups, 0, SampleStatus.FAILED)
    groups.closed(closure_of(groups))
    groups.due()
    assert groups.failure is not None
    assert groups.failure.reason == "WORKFLOW_RAISED"
    assert "replace_exhausted" in groups.failure.message


def test_policy_fail_ends_the_run_with_the_samples_reason() -> None:
    groups = batch(on_sample_failure="fail")
    end(groups, 0, SampleStatus.FAILED)
    groups.due()
    assert groups.failure is not None
    assert groups.failure.message.startswith("ValueError: no")


def test_a_sample_cut_by_nobody_has_a_reason_too() -> None:
    groups = batch(on_sample_failure="fail")
    end(groups, 0, SampleStatus.CANCELLED)
    groups.due()
    assert groups.failure is not None
    assert groups.failure.reason == "INTERNAL"


def test_a_flat_group_is_filtered_when_asked_for() -> None:
    groups = batch(filter_zero_variance=True)
    ids = [SampleId.parse(f"b000000a0-g0000-s{i:03d}a0") for i in range(2)]
    for sample_id in ids:
        groups.sample_changed(
            SampleFact(sample_id=sample_id, status=SampleStatus.DONE, rewards=Rewards(team=1.0))
        )
    close = closure_of(groups, *map(row, ids))
    assert close.drop_reason is VoidReason.ZERO_VARIANCE
    assert {v.reason for v in close.voided} == {VoidReason.ZERO_VARIANCE}


def test_what_the_dispatcher_cut_or_never_knew_counts_as_cut() -> None:
    groups = batch(on_sample_failure="drop_group", samples=3)
    end(groups, 0, SampleStatus.FAILED)
    (cancel,) = groups.due()
    assert isinstance(cancel, CancelSamples)
    assert groups.num_terminal == 0
    assert list(groups.open_samples()) == []
    # It diverges before the cut arrives: it must not start again.
    end(groups, 1, SampleStatus.SUPERSEDED)
    assert groups.due() == []  # one cut is enough
    groups.cut(cancel.samples)
    assert closure_of(groups).status is GroupStatus.DROPPED


def test_rows_that_came_too_late_have_a_reason() -> None:
    groups = batch(on_sample_failure="drop_sample", samples=3)
    failed = end(groups, 0, SampleStatus.FAILED)
    done = end(groups, 1, SampleStatus.DONE)
    end(groups, 2, SampleStatus.DONE)
    groups.closed(closure_of(groups))
    stranger = SampleId.parse("b000000a0-g0009-s000a0")
    assert groups.leftover_reason(row(failed)) is VoidReason.SAMPLE_FAILED
    assert groups.leftover_reason(row(done)) is VoidReason.REDUNDANT
    assert groups.leftover_reason(row(stranger)) is VoidReason.GROUP_DROPPED


def test_rows_that_came_too_late_for_a_dropped_group() -> None:
    groups = batch(on_sample_failure="drop_group")
    end(groups, 0, SampleStatus.FAILED)
    done = end(groups, 1, SampleStatus.DONE)
    groups.closed(closure_of(groups))
    assert groups.leftover_reason(row(done)) is VoidReason.GROUP_DROPPED


def test_a_broken_workflow_ends_the_run() -> None:
    groups = batch()
    for attempt in range(99):
        groups.groups["b000000a0-g0000"].begin((0,), attempt=attempt)
        end(groups, 0, SampleStatus.FAILED, attempt=attempt)
    assert groups.failure == RAISED


def test_redundant_samples_are_started_and_cut_and_their_rows_are_void() -> None:
    groups = batch(samples=2, redundant_samples=2)
    assert len(groups.take_startable()) == 4
    done = [end(groups, ordinal, SampleStatus.DONE) for ordinal in (0, 3)]
    (cancel,) = groups.due()
    assert isinstance(cancel, CancelSamples)
    assert [sample.ordinal for sample in cancel.samples] == [1, 2]
    assert "2 are redundant" in cancel.reason
    # One of them was done before the word arrived, the other one was cut.
    late = end(groups, 1, SampleStatus.DONE)
    assert groups.due() == []
    cut = end(groups, 2, SampleStatus.CANCELLED)
    close = closure_of(groups, *(row(sample_id) for sample_id in (*done, late, cut)))
    assert close.status is GroupStatus.CLOSED
    # Three are done, two are wanted: the first by ordinal, whoever was first in time.
    assert {item.row.sample_id for item in close.released} == {str(done[0]), str(late)}
    assert {v.row.sample_id: v.reason for v in close.voided} == {
        str(done[1]): VoidReason.REDUNDANT,
        str(cut): VoidReason.REDUNDANT,
    }
    assert groups.closed(close)
    assert groups.leftover_reason(row(cut)) is VoidReason.REDUNDANT


def stored(*specs: GroupSpec, **more: Any) -> list[StoredGroup]:
    return [StoredGroup(spec=spec, status=GroupStatus.OPEN, **more) for spec in specs]


def spec(ordinal: int, **more: Any) -> GroupSpec:
    values = {"query_index": 100 + ordinal, **more}
    return GroupSpec(group_id=str(GroupId(BatchId(0), ordinal)), ordinal=ordinal, **values)


def test_groups_of_an_admission_that_a_crash_cut_are_admitted_again() -> None:
    groups = new_batch(4, replace_max=4)
    dropped = StoredGroup(spec=spec(0), status=GroupStatus.DROPPED)
    groups.restore([dropped, *stored(spec(2), spec(5, replaces="somebody"))], [])
    (admit,) = [effect for effect in groups.due() if isinstance(effect, AdmitGroups)]
    assert admit.groups == (spec(1), spec(3), spec(4, replaces=spec(0).group_id))
    assert groups.num_admitted == 6
    assert not [effect for effect in groups.due() if isinstance(effect, AdmitGroups)]


def test_the_query_of_a_lost_group_comes_again_and_takes_no_other() -> None:
    groups = new_batch(3, replace_max=0)
    lost = StoredGroup(spec=spec(1), status=GroupStatus.DROPPED, lost=True)
    groups.restore([lost, *stored(spec(0), spec(2))], [])
    (admit,) = [effect for effect in groups.due() if isinstance(effect, AdmitGroups)]
    again = spec(3, query_index=101, replaces=spec(1).group_id, repeats=True)
    assert admit.groups == (again,)
    assert groups.num_admitted == 3
    groups.admitted(admit.groups)
    taken_up = new_batch(3, replace_max=1)
    taken_up.restore([lost, *stored(spec(0), spec(2), again)], [])
    assert not [effect for effect in taken_up.due() if isinstance(effect, AdmitGroups)]
    # The next query is the one after the last that was taken.
    late = StoredGroup(spec=spec(2), status=GroupStatus.DROPPED)
    taken_up = new_batch(3, replace_max=1)
    taken_up.restore([lost, late, *stored(spec(0), again)], [])
    (admit,) = [effect for effect in taken_up.due() if isinstance(effect, AdmitGroups)]
    assert admit.groups == (spec(4, query_index=103, replaces=spec(2).group_id),)


def test_without_a_row_to_train_on_an_estimator_of_the_runs_own_is_not_asked() -> None:
    groups = batch(advantage=AdvantageRule(estimator="mine:f", scope="agent"))
    end(groups, 0, SampleStatus.DONE)
    end(groups, 1, SampleStatus.DONE)
    close = closure_of(groups)
    assert close.status is GroupStatus.CLOSED
    assert close.released == ()
    assert groups.take_asks() == {}
