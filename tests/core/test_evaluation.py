"""Held-out queries are sampled beside the batches, and never trained on."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from core.run_simulation import World
from core.test_run import AGENTS, rules

from flexmarl.core.evaluation import Evaluation, EvaluationRules
from flexmarl.core.ids import BatchId, GroupId, SampleId
from flexmarl.core.run_effects import AdmitGroups, ReadRows
from flexmarl.core.run_events import RolloutLost
from flexmarl.core.states import RunStatus, SampleStatus
from flexmarl.core.training_rows import Rewards, Row, SampleFact

TWO = EvaluationRules(every=1, num_queries=2)


def fact(query: int, ordinal: int, attempt: int = 0, **more: Any) -> SampleFact:
    group = GroupId(BatchId(4, evaluation=True), query)
    more.setdefault("status", SampleStatus.DONE)
    return SampleFact(sample_id=SampleId(group, ordinal, attempt), **more)


def done(query: int, ordinal: int, team: float, **agents: float) -> SampleFact:
    rewards = Rewards(team=team, agents=agents, metrics={"length": 3.0})
    return fact(query, ordinal, rewards=rewards)


def row(of: SampleFact, agent: str) -> Row:
    sample = str(of.sample_id)
    return Row(vertex_id=f"{sample}/0:0", sample_id=sample, agent=agent, policy="p", path="0:0")


def names(samples: list[SampleId]) -> list[str]:
    return [str(sample) for sample in samples]


@pytest.mark.parametrize(
    ("every", "version", "last", "due"),
    [(0, 0, True, False), (2, 0, False, True), (2, 3, False, False), (2, 3, True, True)],
)
def test_every_kth_version_and_the_last(every, version, last, due) -> None:
    assert EvaluationRules(every=every, num_queries=1).is_due(version, last=last) == due


def test_greedy_and_sampled_beside_each_other() -> None:
    assert list(EvaluationRules().ordinals) == [0, 1]
    assert list(EvaluationRules(greedy=False, num_sampled=2).ordinals) == [1, 2]
    assert list(EvaluationRules(num_sampled=0).ordinals) == [0]


def test_an_evaluation_from_its_queries_to_its_numbers() -> None:
    evaluation = Evaluation(4, TWO)
    (admit,) = evaluation.due()
    assert isinstance(admit, AdmitGroups)
    assert [g.group_id for g in admit.groups] == ["e000004a0-g0000", "e000004a0-g0001"]
    assert [g.query_index for g in admit.groups] == [0, 1]
    assert (evaluation.is_admitted, evaluation.done, list(evaluation.due())) == (False, False, [])
    evaluation.admitted()
    started = names(evaluation.take_startable())
    assert started == [f"e000004a0-g000{q}-s00{s}a0" for q in (0, 1) for s in (0, 1)]
    assert evaluation.take_startable() == []

    facts = [done(0, 0, 1.0, a=2.0), done(0, 1, 0.0, a=4.0), done(1, 0, 0.5)]
    for item in facts:
        evaluation.sample_changed(item)
    evaluation.sample_changed(fact(1, 1, status=SampleStatus.FAILED))
    assert evaluation.num_open == 0
    assert [e.group_id for e in evaluation.due() if isinstance(e, ReadRows)] == [
        "e000004a0-g0000",
        "e000004a0-g0001",
    ]
    assert list(evaluation.due()) == []
    evaluation.rows_read("e000004a0-g0000", tuple(row(f, "a") for f in facts[:2]))
    assert not evaluation.done
    evaluation.rows_read("e000004a0-g0001", (row(facts[2], "b"),))
    assert evaluation.done
    assert evaluation.metrics() == {
        "eval/greedy/team_reward": 0.75,
        "eval/greedy/reward/a": 2.0,
        "eval/greedy/reward/b": 0.5,
        "eval/greedy/metric/length": 3.0,
        "eval/sampled/team_reward": 0.0,
        "eval/sampled/reward/a": 4.0,
        "eval/sampled/metric/length": 3.0,
        "eval/num_failed": 1.0,
    }


def test_rewards_that_are_not_there_are_no_zeros() -> None:
    evaluation = Evaluation(4, EvaluationRules(every=1, num_queries=1, num_sampled=0))
    only_agents = fact(0, 0, rewards=Rewards(agents={"a": 1.0}))
    evaluation.sample_changed(only_agents)
    evaluation.rows_read("e000004a0-g0000", (row(only_agents, "a"), row(only_agents, "other")))
    assert evaluation.metrics() == {"eval/greedy/reward/a": 1.0, "eval/num_failed": 0.0}


def test_a_sample_that_diverged_is_started_again_and_old_news_count_once() -> None:
    evaluation = Evaluation(4, TWO, stored=[done(0, 0, 1.0)])
    assert evaluation.num_open == 3
    evaluation.sample_changed(fact(0, 1, status=SampleStatus.SUPERSEDED))
    assert names(evaluation.take_startable()) == ["e000004a0-g0000-s001a1"]
    for old in (
        fact(0, 1, status=SampleStatus.DONE),  # of the attempt before
        fact(0, 0, status=SampleStatus.FAILED),  # it is done
        fact(1, 0, status=SampleStatus.OPEN),
        fact(9, 0),
    ):
        evaluation.sample_changed(old)
    assert evaluation.num_open == 3
    evaluation.sample_changed(fact(0, 1, attempt=1))
    assert names(evaluation.open_samples()) == [
        "e000004a0-g0001-s000a0",
        "e000004a0-g0001-s001a0",
    ]


@pytest.mark.parametrize("seed", range(6))
def test_runs_with_evaluations_keep_their_invariants(seed: int) -> None:
    world = World(
        rules(evaluation=EvaluationRules(every=2, num_queries=2)),
        Random(seed),
        trouble=0.01 * (seed % 3),
        num_slots=2,
        agents=AGENTS,
    )
    assert world.run().status is RunStatus.FINISHED
    world.check()
    evaluated = {
        f.sample_id.group.batch.batch
        for f in world.store.samples.values()
        if f.sample_id.group.batch.evaluation
    }
    assert evaluated == {0, 2, 3}  # every second one, and the last
    assert world.core.evaluation is not None
    assert world.core.evaluation.done
    assert not [v for v in world.consumed() if v.startswith("e")]


def test_losing_the_dispatcher_starts_open_samples_of_the_evaluation_again() -> None:
    evaluation = EvaluationRules(every=1, num_queries=2)
    world = World(rules(evaluation=evaluation), Random(2), trouble=0.0, num_slots=2, agents=AGENTS)
    while not any(name.startswith("e") for name in world.running):
        world.step()
    assert any("evaluation" in line for line in world.core.waits())
    world.running.clear()
    world.active = None
    world.feed(RolloutLost("another incarnation"))
    assert world.run().status is RunStatus.FINISHED


def test_a_run_ends_with_its_dataset() -> None:
    world = World(
        rules(versions=9, groups=3, evaluation=EvaluationRules(every=9, num_queries=1)),
        Random(1),
        trouble=0.0,
        num_slots=2,
        agents=AGENTS,
        num_queries=7,
        epochs=2,
    )
    assert world.run().status is RunStatus.FINISHED
    world.check()
    assert world.store.version is not None
    assert world.store.version < 9
    taken = [spec.query_index for g, spec in world.store.groups.items() if g.startswith("b")]
    assert sorted(taken) == sorted([*range(7), *range(7)]), "each query once per pass"
    assert world.store.cursor.epoch == 2
