"""Batches that train nothing end the run, unless they may come right by themselves."""

from __future__ import annotations

from random import Random

import pytest
from core.run_simulation import World
from core.test_run import AGENTS, rules

from flexmarl.core.idle import MAX_IN_A_ROW, IdleWatch
from flexmarl.core.states import RunStatus, VoidReason
from flexmarl.core.training_rows import RunFailure

FAILED = RunFailure(
    reason="REWARD_RAISED", message="reward f:g raised KeyError: 'x'", metadata={"what": "f:g"}
)


def judge(watch: IdleWatch, batch: int = 0, *, trained=False, failure=None, **voided: int):
    return watch.judge(
        batch,
        trained=trained,
        voided={VoidReason(name): count for name, count in voided.items()},
        sample_failure=failure,
    )


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ("group", "advantage.scope = 'group' compares team rewards"),
        ("agent", "advantage.scope = 'agent' compares the rewards of agents"),
        ("call_site", "advantage.scope = 'call_site' compares the rewards of agents"),
    ],
)
def test_a_batch_without_any_reward_ends_the_run_at_once(scope, words) -> None:
    failure = judge(IdleWatch(scope), no_reward=64, sample_failed=0)
    assert failure is not None
    assert failure.reason == "REWARD_INVALID"
    assert "batch 0: none of its 64 rows has a reward" in failure.message
    assert words in failure.message


def test_rows_without_reward_beside_trained_ones_are_fine() -> None:
    assert judge(IdleWatch("agent"), trained=True, no_reward=64) is None


def test_batches_in_a_row_that_train_nothing_end_the_run_with_the_cause() -> None:
    watch = IdleWatch("group")
    for batch in range(MAX_IN_A_ROW - 1):
        assert judge(watch, batch, failure=FAILED, sample_failed=8, no_reward=2) is None
    failure = judge(watch, 2, failure=FAILED, sample_failed=8)
    assert failure is not None
    assert (failure.reason, failure.metadata) == ("REWARD_RAISED", {"what": "f:g"})
    assert "3 batches in a row, up to batch 2, trained nothing" in failure.message
    assert "sample_failed 8" in failure.message
    assert "KeyError" in failure.message


def test_one_trained_batch_begins_anew() -> None:
    watch = IdleWatch("group")
    for batch in range(4 * MAX_IN_A_ROW):
        trained = batch % MAX_IN_A_ROW == MAX_IN_A_ROW - 1
        assert judge(watch, batch, trained=trained, sample_failed=8) is None


def test_equal_rewards_are_no_fault_of_the_code() -> None:
    watch = IdleWatch("group")
    assert not [b for b in range(99) if judge(watch, b, zero_variance=8, sample_failed=1)]


def test_a_workflow_that_calls_no_trained_agent_is_told() -> None:
    watch = IdleWatch("group", in_a_row=MAX_IN_A_ROW - 1)
    failure = judge(watch)
    assert failure is not None
    assert failure.reason == "WORKFLOW_RAISED"
    assert "no agent of a trained policy finished a call" in failure.message


def test_gradients_that_are_never_finite_are_told() -> None:
    watch = IdleWatch("group", in_a_row=MAX_IN_A_ROW - 1)
    failure = judge(watch, non_finite=8, failure=FAILED)
    assert failure is not None
    assert failure.reason == "NON_FINITE"


def test_a_run_whose_reward_function_names_nobody_fails_before_its_first_commit() -> None:
    world = World(rules(), Random(3), trouble=0.0, num_slots=2, agents=AGENTS)
    world.without_rewards = True
    end = world.run()
    assert end.status is RunStatus.FAILED
    assert end.failure is not None
    assert end.failure.reason == "REWARD_INVALID"
    assert world.store.version == 0
