"""How a run ends, what it says meanwhile, and what it makes of losses."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from core.run_simulation import World
from core.test_run import AGENTS, rules

from flexmarl.core.batch import BatchGroups
from flexmarl.core.batch_end import MAX_COUNTS, BatchEnd
from flexmarl.core.closure import FailureWatch
from flexmarl.core.dataset_order import Cursor, DatasetOrder
from flexmarl.core.demands import Place
from flexmarl.core.idle import IdleWatch
from flexmarl.core.ids import BatchId, SampleId
from flexmarl.core.policy_training import PolicyRules
from flexmarl.core.run import RunCore
from flexmarl.core.run_effects import (
    ActivateVersion,
    Bind,
    Commit,
    Compute,
    CountVertices,
    Effect,
    EndRun,
    OpenRollout,
    OpenTrainer,
    PrepareWeights,
    SaveGradients,
    SetTimer,
    StartSamples,
    VoidRows,
)
from flexmarl.core.run_events import (
    EffectDone,
    EffectFailed,
    FatalReported,
    RolloutLost,
    SampleChanged,
    StateFact,
    StateSaved,
    StopRequested,
    StoredRun,
    TrainerOpened,
)
from flexmarl.core.slot_places import Places
from flexmarl.core.states import RunStatus, SampleStatus, VoidReason
from flexmarl.core.training import MAX_FAILURES, Training, TrainingRules
from flexmarl.core.training_rows import Row, RunFailure, SampleFact

FAILED = RunFailure(reason="CHILD_DIED", message="rank 0 ended with signal 9")


def world(**more: Any) -> World:
    return World(rules(**more), Random(3), trouble=0.0, num_slots=2, agents=AGENTS)


def until(world: World, condition: Any) -> None:
    while not condition(world):
        assert world.ended is None
        world.step()


def core(**stored: Any) -> RunCore:
    return RunCore(rules(), DatasetOrder(9, seed=0, shuffle=True), StoredRun(**stored))


def test_stages_follow_each_other_and_something_is_always_waited_for() -> None:
    run = world()
    stages = [run.core.stage]
    while run.ended is None:
        assert run.core.waits()
        run.step()
        if run.core.stage != stages[-1]:
            stages.append(run.core.stage)
    assert stages[0] == "starting"
    assert {"hand-over", "rollout", "training", "commit"} <= set(stages)
    assert stages[-1] == "done"


def test_stop_now_ends_at_once() -> None:
    run = world()
    until(run, lambda w: w.store.version == 1)
    run.feed(StopRequested(finish_batch=False))
    assert run.ended is not None
    assert run.ended.status is RunStatus.STOPPED
    assert run.core.handle([StopRequested(finish_batch=True)], now=0.0) == []


def test_stop_after_the_batch_commits_it_first() -> None:
    run = world()
    until(run, lambda w: w.store.version == 1)
    run.feed(StopRequested(finish_batch=True))
    assert run.run().status is RunStatus.STOPPED
    assert run.store.version == 2


def test_stop_before_the_first_version() -> None:
    run = world()
    run.feed(StopRequested(finish_batch=True))
    assert run.ended is not None
    assert run.ended.status is RunStatus.STOPPED


def test_a_service_may_say_that_it_cannot_go_on() -> None:
    run = core()
    run.handle((), now=0.0)
    failure = RunFailure(reason="WORKFLOW_IMPORT_FAILED", message="no module named team")
    (end,) = run.handle([FatalReported(failure)], now=0.0)
    assert isinstance(end, EndRun)
    assert end.failure == failure
    assert end.status is RunStatus.FAILED


def test_a_run_that_fails_names_the_policy_that_cannot_be_bound() -> None:
    run = core()
    effects = run.handle((), now=0.0)
    opened = next(e for e in effects if isinstance(e, OpenTrainer))
    (bind, *_) = run.handle([EffectDone(opened, TrainerOpened(("slot0",)))], now=0.0)
    assert isinstance(bind, Bind)
    failure = RunFailure(reason="MODEL_INVALID", message="no config.json in the folder")
    (end,) = [
        e for e in run.handle([EffectFailed(bind, failure)], now=0.0) if isinstance(e, EndRun)
    ]
    assert end.failure is not None
    assert end.failure.message == "policy frozen: no config.json in the folder"


def opened_with(world_size: int, slots: tuple[str, ...], *, static: bool = False) -> list[Effect]:
    """What a run does once it knows of one slot of t0 and of these of t1."""
    training = replace(
        rules().training,
        policies={"wide": PolicyRules(world_size=world_size)},
        static=static,
    )
    run = RunCore(
        replace(rules(), training=training, trainers=("t0", "t1")),
        DatasetOrder(9, seed=0, shuffle=True),
        StoredRun(),
    )
    first, second = (e for e in run.handle((), now=0.0) if isinstance(e, OpenTrainer))
    assert run.handle([EffectDone(first, TrainerOpened(("slot0",)))], now=0.0) == []
    return run.handle([EffectDone(second, TrainerOpened(slots))], now=0.0)


def test_a_policy_that_the_trainers_have_no_slots_for_ends_the_run_once_all_are_known() -> None:
    (end,) = opened_with(3, ("slot0",))
    assert isinstance(end, EndRun)
    assert end.failure is not None
    assert end.failure.message == (
        "policies.wide.trainer.world_size = 3: the trainers do not have as many slots "
        "(t0 has 1, t1 has 1)"
    )


def test_places_for_more_ranks_than_there_are_slots_end_the_run() -> None:
    training = Training(
        TrainingRules(
            policies={"a": PolicyRules(world_size=2), "b": PolicyRules(), "c": PolicyRules()},
            static=True,
        )
    )
    training.trainer_opened("t0", ("slot0", "slot1"))
    training.trainer_opened("t1", ("slot0",))
    training.trainers_complete()
    assert training.failure is not None
    assert training.failure.message == (
        'pipeline.allocation = "static", 4 slots in sum: the trainers do not have as many slots '
        "(t0 has 2, t1 has 1)"
    )


def test_nobody_is_bound_to_what_may_be_another_ones_place() -> None:
    """Bound to a place of another policy, a policy with a place would keep it for the whole run."""
    policies = {name: PolicyRules() for name in ("a", "b")}
    training = Training(TrainingRules(policies=policies, static=True))

    def bound() -> dict[str, str]:
        effects = training.due(version=None, now=0.0)
        return {e.policy: e.trainer for e in effects if isinstance(e, Bind)}

    training.trainer_opened("t0", ("slot0",))
    assert bound() == {}, "t0 has a place for one of them, and t1 may be here soon"
    training.trainer_opened("t1", ("slot0",))
    training.trainers_complete()
    assert bound() == {"a": "t0", "b": "t1"}


def test_a_policy_lies_on_one_trainer_where_one_has_the_slots() -> None:
    (bind,) = opened_with(2, ("slot0", "slot1"))
    assert isinstance(bind, Bind)
    assert (bind.trainer, bind.slots, bind.beyond) == ("t1", ("slot0", "slot1"), ())


@pytest.mark.parametrize("static", [False, True])
def test_a_policy_lies_on_several_trainers_where_none_has_the_slots(static: bool) -> None:
    (bind,) = opened_with(2, ("slot0",), static=static)
    assert isinstance(bind, Bind)
    assert (bind.trainer, bind.slots) == ("t0", ("slot0",))
    assert bind.beyond == (Place("t1", ("slot0",)),)
    assert bind.waits == "trainer t0: bind wide to slot0; slot0 of trainer t1"


def test_places_over_trainers_are_what_the_others_leave() -> None:
    places = Places({"a": 1, "b": 3, "c": 4})
    slots = ("x", "y")
    found = {
        "a": (Place("t0", ("x",)),),
        "b": (Place("t1", ("x", "y")), Place("t0", ("y",))),
        "c": (),
    }
    for _ in range(2):  # again after a restart
        places.find({"t0": slots, "t1": slots})
        assert {name: places.of(name) for name in found} == found


@pytest.mark.parametrize("lost", ["t0", "t1"])
def test_a_lost_trainer_ends_the_bindings_with_ranks_on_it(lost: str) -> None:
    training = Training(TrainingRules(policies={"p": PolicyRules(world_size=2)}))
    for name in ("t0", "t1"):
        training.trainer_opened(name, ("slot0",))
    training.trainers_complete()
    (bind,) = [e for e in training.due(version=None, now=0.0) if isinstance(e, Bind)]
    binding = training.policies["p"].binding
    assert binding is not None
    assert binding.num_slots == 2
    training.trainer_lost(lost)
    assert training.policies["p"].binding is None
    # A late answer is of the old binding; nothing is bound until both are there again.
    assert not training.done(bind, StateSaved(StateFact(version=0)), now=1.0)
    assert [e for e in training.due(version=None, now=1.0) if isinstance(e, Bind)] == []
    training.trainer_opened(lost, ("slot0",))
    training.trainers_complete()
    assert [e for e in training.due(version=None, now=1.0) if isinstance(e, Bind)]


def test_failures_in_a_row_are_bounded() -> None:
    training = Training(TrainingRules(policies={"p": PolicyRules()}))
    training.trainer_opened("t0", ("slot0",))
    now = 0.0
    for _ in range(MAX_FAILURES):
        assert training.failure is None
        (bind,) = [e for e in training.due(version=None, now=now) if isinstance(e, Bind)]
        training.failed(bind, FAILED, now=now)
        waits = [e for e in training.due(version=None, now=now) if isinstance(e, SetTimer)]
        assert [timer.name for timer in waits] == ["allocation"]
        now = waits[0].at
    assert training.failure is not None


def test_a_binding_that_succeeds_does_not_hide_that_its_work_always_fails() -> None:
    training = Training(TrainingRules(policies={"p": PolicyRules()}))
    training.begin_batch(BatchId(0))
    policy = training.policies["p"]
    policy.adopt(StateFact(version=0))
    policy.queue.add((ROW,), group_ordinal=0)
    policy.subgraph_closed = True
    (create, *_) = training.due(version=0, now=0.0)
    policy.created(create.micro_batch_id)  # type: ignore[union-attr]
    training.trainer_opened("t0", ("slot0",))
    now = 0.0
    for _ in range(MAX_FAILURES):
        assert training.failure is None
        (bind,) = [e for e in training.due(version=0, now=now) if isinstance(e, Bind)]
        training.done(bind, StateSaved(StateFact(version=0)), now=now)
        (compute,) = [e for e in training.due(version=0, now=now) if isinstance(e, Compute)]
        training.failed(compute, FAILED, now=now)
        now += 60.0
    assert training.failure is not None


def test_an_answer_about_an_older_binding_is_left_aside() -> None:
    training = Training(TrainingRules(policies={"p": PolicyRules()}))
    training.trainer_opened("t0", ("slot0",))
    (bind,) = [e for e in training.due(version=None, now=0.0) if isinstance(e, Bind)]
    training.trainer_lost("t0")
    training.trainer_lost("t0")
    training.failed(bind, FAILED, now=0.0)
    assert not training.done(bind, StateSaved(StateFact(version=0)), now=0.0)
    assert not training.all_have_state


def test_gradients_are_saved_while_they_wait_for_more() -> None:
    run = world(ledger=0.05, groups=4)
    seen: list[str] = []
    while run.ended is None:
        seen.extend(type(e).__name__ for e in run.pending if isinstance(e, SaveGradients))
        run.step()
    assert seen


def test_losing_the_dispatcher_starts_open_samples_again() -> None:
    run = world()
    until(run, lambda w: w.running and len(w.pending) == 0)
    before = set(run.running)
    run.running.clear()
    run.feed(RolloutLost("another incarnation"))
    opening = next(e for e in run.pending if isinstance(e, OpenRollout))
    run.pending.remove(opening)
    run.feed(EffectDone(opening))
    activate = next(e for e in run.pending if isinstance(e, ActivateVersion))
    run.pending.remove(activate)
    run.feed(EffectDone(activate))
    start = next(e for e in run.pending if isinstance(e, StartSamples))
    assert {str(s) for s in start.samples} == before


def test_what_an_older_opening_of_the_dispatcher_says_is_left_aside() -> None:
    run = core(version=1)
    effects = run.handle((), now=0.0)
    opening = next(e for e in effects if isinstance(e, OpenRollout))
    run.handle([RolloutLost("another incarnation")], now=0.0)
    run.handle([EffectDone(opening)], now=0.0)
    assert run.stage == "hand-over"
    old = ActivateVersion(version=1, epoch=0, reason="old")
    run.handle([EffectDone(old), EffectFailed(old, FAILED)], now=0.0)
    assert run.ended is None
    assert run.stage == "hand-over"


def test_only_what_nothing_depends_on_may_fail() -> None:
    run = core(version=1)
    run.handle((), now=0.0)
    run.handle(
        [EffectFailed(PrepareWeights(version=2, policy="p1", reason="early"), FAILED)], now=0.0
    )
    assert run.ended is None
    effect = Commit(
        version=2, expected_version=1, stepped=(), cursor=Cursor(), reason="it is complete"
    )
    (end,) = run.handle([EffectFailed(effect, FAILED)], now=0.0)
    assert isinstance(end, EndRun)
    assert end.failure == FAILED


def test_the_dispatchers_own_failure_ends_the_run() -> None:
    run = core()
    opening = next(e for e in run.handle((), now=0.0) if isinstance(e, OpenRollout))
    ends = run.handle([EffectFailed(opening, FAILED)], now=0.0)
    assert isinstance(ends[-1], EndRun)


def test_a_finished_run_is_activated_and_finished_again() -> None:
    run = core(version=3)
    assert run.batch is None
    late = SampleFact(sample_id=SampleId.parse("b000002a0-g0000-s000a0"), status=SampleStatus.DONE)
    assert run.handle([SampleChanged(late)], now=0.0)
    run = core(version=3)
    opening = next(e for e in run.handle((), now=0.0) if isinstance(e, OpenRollout))
    (activate,) = run.handle([EffectDone(opening)], now=0.0)
    (end,) = run.handle([EffectDone(activate)], now=0.0)
    assert isinstance(end, EndRun)
    assert end.status is RunStatus.FINISHED


def test_states_of_policies_that_are_no_more_are_left_aside() -> None:
    run = core(states={"gone": StateFact(version=0), "p1": StateFact(version=0)})
    assert run.training.policies["p1"].has_state
    assert not run.training.policies["p2"].has_state


def ended_batch() -> tuple[BatchEnd, Training]:
    training = Training(TrainingRules(policies={"p": PolicyRules()}))
    training.begin_batch(BatchId(0))
    groups = BatchGroups(
        BatchId(0),
        rules(groups=1, samples=1).batch,
        query_at=lambda ordinal: ordinal,
        watch=FailureWatch(1, num_done=1),
    )
    (admit,) = groups.due()
    groups.groups[admit.groups[0].group_id].stage = groups.groups[  # type: ignore[union-attr]
        admit.groups[0].group_id  # type: ignore[union-attr]
    ].stage.TERMINAL
    groups._num_terminal = 1
    training.policies["p"].subgraph_closed = True
    return BatchEnd(groups, training, IdleWatch("group")), training


def due(end: BatchEnd) -> list[Any]:
    return list(end.due(version=0, cursor=Cursor(0, 1)))


ROW = Row(
    vertex_id="b000000a0-g0000-s000a0/0:0",
    sample_id="b000000a0-g0000-s000a0",
    agent="a",
    policy="p",
    path="0:0",
)


def test_leftovers_are_voided_and_counted_again() -> None:
    end, _ = ended_batch()
    (count,) = due(end)
    assert isinstance(count, CountVertices)
    assert due(end) == []
    end.counted((ROW,), {})
    (void,) = due(end)
    assert isinstance(void, VoidRows)
    assert void.rows[0].reason is VoidReason.REDUNDANT
    end.voided()
    (count,) = due(end)
    end.counted((), {VoidReason.REDUNDANT: 1})
    (commit,) = due(end)
    assert isinstance(commit, Commit)
    assert (commit.version, commit.expected_version, commit.stepped) == (1, 0, ())


def test_a_batch_that_never_adds_up_fails_the_run() -> None:
    end, _ = ended_batch()
    for _ in range(MAX_COUNTS):
        assert end.failure is None
        due(end)
        end.counted((ROW,), {})
        due(end)
        end.voided()
    assert end.failure is not None
    assert ROW.vertex_id in end.failure.message


def test_rows_of_a_dropped_micro_batch_stay_void_when_the_trainer_is_lost() -> None:
    end, training = ended_batch()
    policy = training.policies["p"]
    policy.adopt(StateFact(version=0))
    policy.queue.add([ROW], group_ordinal=0)
    (create,) = policy.form()
    policy.created(create.micro_batch_id)
    list(policy.marks_due())
    policy.marked(create.micro_batch_id)
    policy.computed(create.micro_batch_id, non_finite=True, now=0.0)
    (void,) = due(end)
    assert void.rows[0].reason is VoidReason.NON_FINITE
    policy.unbind()
    end.voided()
    assert policy.settled
    assert policy.ready == []
    assert isinstance(due(end)[0], CountVertices)


@pytest.mark.parametrize("rows", [0, 3])
def test_rows_waiting_counts_what_is_in_no_sum(rows: int) -> None:
    policy = Training(TrainingRules(policies={"p": PolicyRules(micro_batch_rows=2)})).policies["p"]
    policy.begin_batch(BatchId(0))
    policy.queue.add([ROW] * rows, group_ordinal=0)
    assert policy.rows_waiting == rows
    policy.form()
    assert policy.rows_waiting == rows


def test_computing_needs_a_state_to_begin_with() -> None:
    run = world()
    until(run, lambda w: any(isinstance(e, Compute) for e in w.pending))
    assert run.store.version is not None
