"""The numbers of a batch."""

from __future__ import annotations

from random import Random

import pytest
from core.run_simulation import World
from core.test_batch import RAISED, batch, closure_of, end, row
from core.test_run import AGENTS, rules

from flexmarl.core.batch_metrics import (
    StepClock,
    TrainMeans,
    batch_metrics,
    failure_reason,
    num_groups,
    reward_alarms,
)
from flexmarl.core.ids import SampleId
from flexmarl.core.policy_training import PolicyRules
from flexmarl.core.states import GroupStatus, SampleStatus
from flexmarl.core.training import Training, TrainingRules
from flexmarl.core.training_rows import Rewards, RunFailure, SampleFact


def test_the_parts_of_a_step_add_up() -> None:
    clock = StepClock(begun=10.0, committed=11.0, activated=13.0, closed=17.0)
    parts = clock.parts(20.0)
    assert parts == {
        "step_s": 10.0,
        "step/commit_s": 1.0,
        "step/hand_over_s": 2.0,
        "step/rollout_s": 4.0,
        "step/training_tail_s": 3.0,
    }


def test_a_step_that_a_restart_cut_still_adds_up() -> None:
    parts = StepClock(begun=1.0).parts(4.0)
    assert parts["step_s"] == sum(v for name, v in parts.items() if name != "step_s") == 3.0


def test_trainer_numbers_are_weighted_and_taken_once() -> None:
    means = TrainMeans()
    means.add("p", {"loss": 1.0, "bad": float("nan")}, weight=1.0)
    means.add("p", {"loss": 4.0}, weight=2.0)
    means.put("p", {"grad_norm": 0.5})
    assert means.take() == {"p": {"loss": 3.0, "grad_norm": 0.5}}
    assert means.take() == {}


def test_the_largest_is_not_averaged_and_seconds_and_counts_add_up() -> None:
    means = TrainMeans()
    for gap, forward in ((0.5, 1.0), (0.2, 2.0)):
        means.add("p", {"logprob_gap_max": gap}, weight=1.0)
        means.spend("p", {"forward": forward})
    means.count("q", "non_finite")
    assert means.take() == {
        "p": {"logprob_gap_max": 0.5, "seconds/forward": 3.0},
        "q": {"non_finite": 1.0},
    }


def test_rewards_and_tokens() -> None:
    groups = batch(on_sample_failure="drop_sample", samples=3)
    ids = [SampleId.parse(f"b000000a0-g0000-s{i:03d}a0") for i in range(3)]
    for number, sample_id in enumerate(ids[:2]):
        groups.sample_changed(
            SampleFact(
                sample_id=sample_id,
                status=SampleStatus.DONE,
                rewards=Rewards(
                    team=float(number), agents={"solver": 2.0}, metrics={"exact": float(number)}
                ),
            )
        )
    end(groups, 2, SampleStatus.FAILED)
    rows = [row(sample_id, num_response_tokens=5) for sample_id in ids]
    other = row(ids[0], num_response_tokens=1)
    nobody = type(other)(
        vertex_id=f"{ids[0]}/0:9", sample_id=str(ids[0]), agent="judge", policy="p", path="0:9"
    )
    groups.closed(closure_of(groups, *rows, nobody))
    training = Training(TrainingRules(policies={"p": PolicyRules()}))
    metrics = batch_metrics(groups, training, step_s=2.0)
    assert metrics == {
        "num_samples": 2.0,
        "num_failed": 1.0,
        "zero_variance_groups": 0.0,
        f"sample_failures/{RAISED.reason}": 1.0,
        "team_reward": 0.5,
        "reward/solver": 2.0,
        "metric/exact": 0.5,
        "tokens/sampled": 15.0,
        "tokens_per_s/sampled": 7.5,
        "tokens/trained": 0.0,
        "tokens_per_s/trained": 0.0,
    }
    assert "tokens_per_s/sampled" not in batch_metrics(groups, training, step_s=0.0)
    assert num_groups(groups, GroupStatus.CLOSED) == 1
    assert num_groups(groups, GroupStatus.DROPPED) == 0


def test_without_rewards_there_are_no_means() -> None:
    groups = batch()
    sample_id = SampleId.parse("b000000a0-g0000-s000a0")
    groups.sample_changed(SampleFact(sample_id=sample_id, status=SampleStatus.DONE))
    training = Training(TrainingRules(policies={"p": PolicyRules()}))
    metrics = batch_metrics(groups, training, step_s=1.0)
    assert "team_reward" not in metrics
    assert RAISED.reason not in metrics


@pytest.mark.parametrize("seed", range(2))
def test_trained_tokens_are_those_of_the_update(seed: int) -> None:
    world = World(rules(), Random(seed), trouble=0.0, num_slots=3, agents=AGENTS)
    while world.store.version != 0 or not world.core.training.settled:
        world.step()
    assert world.core.batch is not None
    metrics = batch_metrics(world.core.batch, world.core.training, step_s=1.0)
    consumed = len(world.consumed())
    assert metrics["tokens/trained"] == 3.0 * consumed
    assert metrics["tokens/sampled"] >= metrics["tokens/trained"] > 0


ID = SampleId.parse("b000000a0-g0000-s000a0")


def scored(**rewards: object) -> SampleFact:
    return SampleFact(sample_id=ID, status=SampleStatus.DONE, rewards=Rewards(**rewards))


def unscored(reason: str) -> SampleFact:
    failure = RunFailure(reason=reason, message="no")
    return SampleFact(sample_id=ID, status=SampleStatus.FAILED, failure=failure)


def test_a_failure_without_a_reason_is_an_internal_one() -> None:
    assert failure_reason(unscored("REWARD_RAISED")) == "REWARD_RAISED"
    assert failure_reason(SampleFact(sample_id=ID, status=SampleStatus.FAILED)) == "INTERNAL"


@pytest.mark.parametrize(
    ("facts", "alarms"),
    [
        ([scored(team=0.0)] * 3, {"alarm/zero_rewards": 3.0}),
        ([scored(team=0.0), scored(team=0.5)], {}),
        ([scored(team=0.0, agents={"a": 0.0}, vertices={"v": 1.0})], {}),
        ([scored(agents={"a": 0.0})], {"alarm/zero_rewards": 1.0}),
        ([scored()], {}),
        ([], {}),
        ([unscored("REWARD_RAISED"), scored(team=1.0)], {"alarm/reward_failures": 1.0}),
        ([unscored("REWARD_INVALID")] * 2, {"alarm/reward_failures": 2.0}),
        ([unscored("WORKFLOW_RAISED")], {}),
    ],
)
def test_rewards_that_a_person_should_look_at(facts, alarms) -> None:
    assert reward_alarms(facts) == alarms
