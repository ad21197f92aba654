"""A run under chance keeps its invariants and ends (I5, I7, I9)."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from core.run_simulation import World
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.core.advantages import AdvantageRule
from flexmarl.core.batch_rules import BatchRules
from flexmarl.core.closure import ClosureRules
from flexmarl.core.evaluation import EvaluationRules
from flexmarl.core.policy_training import PolicyRules
from flexmarl.core.run import RunRules
from flexmarl.core.run_effects import ComputeAdvantages
from flexmarl.core.states import RunStatus, VoidReason
from flexmarl.core.training import TrainingRules

pytestmark = pytest.mark.timeout(300)  # thousands of steps, under coverage, on a shared machine

AGENTS = {"splitter": "p1", "sorter": "p2", "merger": "p3", "judge": "frozen"}
POLICIES = {
    "p1": PolicyRules(micro_batch_rows=4),
    "p2": PolicyRules(micro_batch_rows=3, max_world_size=3),
    "p3": PolicyRules(micro_batch_rows=100),
    "frozen": PolicyRules(trained=False),
}

MODES: dict[str, dict[str, bool]] = {
    "on_demand": {},
    "synchronous": {"overlaps": False},
    "static": {"static": True},
    "colocated": {"overlaps": False, "colocated": True},
}


def rules(**more: Any) -> RunRules:
    closure = ClosureRules(
        on_sample_failure=more.get("on_failure", "refill"),
        filter_zero_variance=more.get("filter_flat", False),
        replace_max=more.get("replace_max", 3),
    )
    return RunRules(
        num_versions=more.get("versions", 3),
        batch=BatchRules(
            num_groups=more.get("groups", 3),
            samples_per_group=more.get("samples", 3),
            closure=closure,
            advantage=AdvantageRule(
                estimator=more.get("estimator", "grpo"), scope=more.get("scope", "agent")
            ),
        ),
        training=TrainingRules(
            policies=POLICIES,
            min_residence_s=more.get("residence", 0.0),
            ledger_every_s=more.get("ledger", 0.5),
            prefetch_from_s=0.0,
            **MODES[more.get("mode", "on_demand")],
        ),
        trainers=more.get("trainers", ("t0",)),
        evaluation=more.get("evaluation", EvaluationRules()),
    )


def test_a_quiet_run_finishes() -> None:
    world = World(rules(), Random(1), trouble=0.0, num_slots=2, agents=AGENTS)
    assert world.run().status is RunStatus.FINISHED
    assert world.store.version == 3
    world.check()


def test_a_policy_that_waits_for_anothers_residence_is_looked_at_when_that_ends() -> None:
    slow_swaps = rules(residence=2.0, groups=6)
    world = World(slow_swaps, Random(1), trouble=0.0, num_slots=1, agents=AGENTS)
    assert world.run().status is RunStatus.FINISHED
    world.check()
    assert "allocation" in world.timers_set


def test_a_policy_is_widened_over_slots_that_nobody_needs() -> None:
    worlds = [
        World(rules(groups=6), Random(seed), trouble=0.01, num_slots=4, agents=AGENTS)
        for seed in range(4)
    ]
    for world in worlds:
        assert world.run().status is RunStatus.FINISHED
        world.check()
    assert sum(world.num_wide for world in worlds) > 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    trouble=st.sampled_from([0.0, 0.01, 0.04]),
    num_slots=st.integers(1, 4),
    on_failure=st.sampled_from(["refill", "drop_sample", "drop_group"]),
    filter_flat=st.booleans(),
    scope=st.sampled_from(["group", "agent", "call_site"]),
    residence=st.sampled_from([0.0, 0.3]),
)
def test_invariants_hold_in_any_order_of_events(
    seed, trouble, num_slots, on_failure, filter_flat, scope, residence
) -> None:
    world = World(
        rules(on_failure=on_failure, filter_flat=filter_flat, scope=scope, residence=residence),
        Random(seed),
        trouble=trouble,
        num_slots=num_slots,
        agents=AGENTS,
    )
    ended = world.run()
    world.check()
    if ended.status is RunStatus.FINISHED:
        assert world.store.version == 3
    else:
        # Eight losses in a row, or a first group of failures alone: both are allowed to end it.
        assert ended.failure is not None
        assert ended.failure.reason in ("CHILD_DIED", "WORKFLOW_RAISED")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_with_ranks_on_two_trainers(mode: str, seed: int) -> None:
    wide = rules(mode=mode)
    policies = {**POLICIES, "p2": replace(POLICIES["p2"], world_size=2)}
    world = World(
        replace(wide, trainers=("t0", "t1"), training=replace(wide.training, policies=policies)),
        Random(seed),
        trouble=0.01 * (seed % 3),
        num_slots=2 if mode == "static" else 1,
        agents=AGENTS,
    )
    assert world.run().status is RunStatus.FINISHED
    world.check()
    assert world.most_trainers == (1 if mode == "static" else 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_invariants_hold_in_every_mode(mode: str, seed: int) -> None:
    world = World(
        rules(mode=mode), Random(seed), trouble=0.01 * (seed % 3), num_slots=3, agents=AGENTS
    )
    assert world.run().status is RunStatus.FINISHED
    world.check()


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    trouble=st.sampled_from([0.0, 0.03]),
    num_slots=st.integers(1, 3),
    residence=st.sampled_from([0.0, 0.3]),
)
def test_invariants_hold_over_two_trainers(seed, trouble, num_slots, residence) -> None:
    world = World(
        rules(trainers=("t0", "t1"), residence=residence),
        Random(seed),
        trouble=trouble,
        num_slots=num_slots,
        agents=AGENTS,
    )
    world.run()
    world.check()


@pytest.mark.parametrize("seed", range(8))
def test_invariants_hold_with_an_estimator_of_the_runs_own(seed: int) -> None:
    world = World(
        rules(estimator="mine:advantages", groups=5, filter_flat=bool(seed % 2)),
        Random(seed),
        trouble=0.015 * (seed % 4),
        num_slots=2,
        agents=AGENTS,
    )
    assert world.run().status is RunStatus.FINISHED
    world.check()


def test_an_estimator_of_the_runs_own_is_asked_again_when_its_answer_is_lost() -> None:
    own = rules(estimator="mine:advantages")
    world = World(own, Random(0), trouble=0.0, num_slots=2, agents=AGENTS)
    while not any(isinstance(effect, ComputeAdvantages) for effect in world.pending):
        world.step()
    world.lose_rollout()
    assert world.run().status is RunStatus.FINISHED
    world.check()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    trouble=st.sampled_from([0.0, 0.03]),
    on_failure=st.sampled_from(["refill", "drop_sample"]),
    replace_max=st.sampled_from([0, 3]),
)
def test_invariants_hold_when_samples_leave_policies_early(
    seed, trouble, on_failure, replace_max
) -> None:
    world = World(
        rules(on_failure=on_failure, replace_max=replace_max, scope="agent"),
        Random(seed),
        trouble=trouble,
        num_slots=2,
        agents=AGENTS,
        choosy=True,
    )
    world.run()
    world.check()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    trouble=st.sampled_from([0.0, 0.02]),
    lost_after=st.integers(0, 250),
    on_failure=st.sampled_from(["refill", "drop_sample"]),
)
def test_invariants_hold_when_a_store_shard_is_lost(seed, trouble, lost_after, on_failure) -> None:
    world = World(
        rules(on_failure=on_failure, groups=4),
        Random(seed),
        trouble=trouble,
        num_slots=2,
        agents=AGENTS,
        choosy=True,
    )
    for _ in range(lost_after):
        if world.ended is None:
            world.step()
    if world.ended is None and world.core.batch is not None:
        world.lose_shard()
    world.run()
    world.check()


# Seeds with which every policy has something to learn in batch 1.
@pytest.mark.parametrize("num_updated", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1, 4])
def test_groups_lost_after_their_subgraphs_closed_come_again_while_a_policy_can_learn(
    num_updated: int, seed: int
) -> None:
    world = World(rules(), Random(seed), trouble=0.0, num_slots=1, agents=AGENTS)

    def updated() -> int:
        return sum(state.has_updated(1) for state in world.store.states.values())

    while len([m for m in world.store.closed if m[0] == 1]) < 3 or updated() < num_updated:
        world.step()
    num_updated = updated()
    world.lose_shard()
    assert world.run().status is RunStatus.FINISHED
    world.check()
    repeats = [spec for spec in world.store.groups.values() if spec.repeats]
    assert bool(repeats) == (num_updated < 3)
    redundant = [v for v, why in world.store.void.items() if why is VoidReason.REDUNDANT]
    assert bool(redundant) == (0 < num_updated < 3)


def test_a_policy_that_no_open_sample_can_reach_is_updated_early() -> None:
    early = 0
    for seed in range(6):
        world = World(
            rules(on_failure="drop_sample", replace_max=0),
            Random(seed),
            trouble=0.0,
            num_slots=2,
            agents=AGENTS,
            choosy=True,
        )
        world.run()
        world.check()
        early += len(world.store.early)
    assert early > 0


@pytest.mark.parametrize("seed", range(8))
def test_the_same_chance_makes_the_same_run(seed: int) -> None:
    worlds = [
        World(rules(), Random(seed), trouble=0.02, num_slots=2, agents=AGENTS) for _ in range(2)
    ]
    ends = [world.run() for world in worlds]
    assert ends[0] == ends[1]
    assert worlds[0].store == worlds[1].store
    assert worlds[0].steps == worlds[1].steps
