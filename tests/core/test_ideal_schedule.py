"""The ideal schedule of a workload, by hand on small ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.ideal_schedule import Mode, ideal_steps, mean_step_s
from flexmarl.core.workload import Workload, levels, parse_workload, remaining_paths

WORKLOADS = Path(__file__).parents[3] / "shared/workloads"


def document(*batches: Any, instances: int = 2, units: int = 2, groups: int = 4) -> dict[str, Any]:
    """One token takes a second at an engine and a second on a unit; prompts cost nothing."""
    return {
        "name": "tiny",
        "policies": {"a": {"params_b": 10}, "b": {"params_b": 5}},
        "agents": {"a": "a", "b": "b"},
        "pools": {
            "rollout_instances": instances,
            "trainer_units": units,
            "colocated_groups": groups,
        },
        "engine": {
            "max_concurrency": 1,
            "prefill_tokens_per_s": 1,
            "decode_tokens_per_s": {"a": 1, "b": 1},
        },
        "trainer": {
            "tokens_per_s_per_unit": {"a": 1, "b": 1},
            "apply_s_per_b": 0.1,
            "publish_and_load_s_per_b": 0.3,
            "colocated_switch_s_per_b": 0.2,
        },
        "batches": batches,
    }


def chain(*calls: tuple[str, int]) -> list[dict[str, Any]]:
    return [
        vertex(number, agent, output, after=[number - 1] if number else [])
        for number, (agent, output) in enumerate(calls)
    ]


def vertex(number: int, agent: str, output: int, *, after: list[int], **more: Any) -> Any:
    zero = {"prompt_tokens": 0, "tool_s": 0.0}
    return {"id": number, "agent": agent, "after": after, "output_tokens": output, **zero, **more}


def workload(*batches: Any, **pools: int) -> Workload:
    return parse_workload(document(*batches, **pools))


def step(mode: Mode, *groups: Any, **pools: int):
    (found,) = ideal_steps(workload(list(groups), **pools), mode)
    return found


def test_a_call_costs_its_tool_its_prompt_and_its_output() -> None:
    calls = [vertex(7, "a", 3, after=[], prompt_tokens=5, tool_s=0.5)]
    (((call,),),) = workload([[calls]]).batches[0]
    assert (call.engine_s, call.unit_s) == (8.5, 8.0)


def test_paths_and_levels_of_a_diamond() -> None:
    calls = [
        vertex(3, "a", 1, after=[]),
        vertex(5, "b", 4, after=[3]),
        vertex(6, "b", 2, after=[3]),
        vertex(9, "a", 1, after=[5, 6]),
    ]
    ((sample,),) = workload([[calls]]).batches[0]
    assert remaining_paths(sample) == [6.0, 5.0, 3.0, 1.0]
    assert levels(sample) == [0, 1, 1, 2]


def test_a_workload_that_cannot_be_read_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="no key 'pools'"):
        parse_workload({"trainer": {}})
    with pytest.raises(ValueError, match="vertex 0 comes before vertex 1"):
        workload([[[vertex(0, "a", 1, after=[1])]]])


def test_any_slot_serves_any_policy_and_the_longest_way_goes_first() -> None:
    # Two slots: the chain of 5 first; the calls of 2 fit beside it, in any other order they do not.
    found = step(Mode.FULL, [chain(("b", 2)), chain(("b", 2)), chain(("a", 2), ("a", 3))])
    assert found.rollout_s == 5.0
    assert found.longest_chain_s == 5.0
    assert found.work_over_capacity_s == 4.5
    # All rows at 5 s, 9 unit-seconds on two units, then 10 x (0.1 + 0.3) s of the larger policy.
    assert found.step_s == pytest.approx(5.0 + 4.5 + 4.0)


def test_the_oldest_group_goes_first_and_is_trained_while_others_run() -> None:
    groups = ([chain(("a", 2))], [chain(("a", 9))])
    one = step(Mode.FULL, *groups, instances=1, units=1)
    assert one.rollout_s == 11.0
    assert one.step_s == pytest.approx(11.0 + 9.0 + 4.0)  # the first group's rows cost nothing
    whole = step(Mode.NO_ASYNC, *groups, instances=1, units=1)
    assert whole.step_s == pytest.approx(11.0 + 11.0 + 4.0)


def test_a_join_starts_after_the_last_of_those_that_it_waits_for() -> None:
    diamond = [
        vertex(0, "a", 1, after=[]),
        vertex(1, "a", 2, after=[0]),
        vertex(2, "b", 5, after=[0]),
        vertex(3, "a", 1, after=[1, 2]),
    ]
    assert step(Mode.FULL, [diamond]).rollout_s == 1 + 5 + 1


def test_without_balancing_each_policy_has_its_share_of_the_slots() -> None:
    group = [chain(("a", 3)), chain(("a", 3))]
    assert step(Mode.FULL, group).rollout_s == 3.0
    assert step(Mode.NO_BALANCE, group).rollout_s == 6.0


def test_without_allocation_each_policy_has_one_unit() -> None:
    group = [chain(("a", 6)), chain(("b", 2))]
    assert step(Mode.FULL, group).step_s == pytest.approx(6.0 + 4.0 + 4.0)
    assert step(Mode.NO_ALLOC, group).step_s == pytest.approx(6.0 + 6.0 + 4.0)
    # Who has no row does not step, and costs nothing.
    assert step(Mode.NO_ALLOC, [chain(("b", 2))]).step_s == pytest.approx(2.0 + 2.0 + 2.0)


def test_distrl_has_neither() -> None:
    group = [chain(("a", 3)), chain(("a", 3)), chain(("b", 1))]
    assert step(Mode.DISTRL, group).step_s == pytest.approx(6.0 + 6.0 + 4.0)


def test_colocated_devices_are_paid_for_both_ways() -> None:
    # Four devices, two per policy; half of (10 + 5) x 0.2 s there, and again back.
    group = [chain(("a", 3)), chain(("a", 3)), chain(("b", 1))]
    found = step(Mode.MARTI, group)
    assert found.rollout_s == 3.0
    assert found.step_s == pytest.approx(3.0 + 1.5 + 3.0 + 4.0 + 1.5)


def test_serial_takes_queries_and_levels_in_turn_and_pays_for_each_change() -> None:
    group = [chain(("a", 1), ("b", 2)), chain(("b", 4))]
    # Level 0: a 1 s, then change to b (0.5 s) 4 s; level 1: b stays, 2 s.
    found = step(Mode.MAS_RL, group)
    assert found.rollout_s == pytest.approx(1 + 0.5 + 4 + 2)
    # The next query changes back to a (1 s).
    two = step(Mode.MAS_RL, group, [chain(("a", 1))])
    assert two.rollout_s == pytest.approx(found.rollout_s + 1 + 1)
    many = step(Mode.MAS_RL, [chain(("a", 2))] * 5)
    assert many.rollout_s == 4.0  # five calls on four devices


def test_the_mean_is_over_batches() -> None:
    steps = ideal_steps(workload([[chain(("b", 2))]], [[chain(("b", 4))]]), Mode.NO_ALLOC)
    assert mean_step_s(steps) == pytest.approx((6.0 + 10.0) / 2)


@pytest.mark.skipif(not WORKLOADS.is_dir(), reason="the emulated workloads are not here")
@pytest.mark.parametrize("name", ["ma", "ca"])
def test_on_the_real_workloads_every_part_is_worth_something(name: str) -> None:
    real = parse_workload(json.loads((WORKLOADS / f"{name}.json").read_text()))
    full = ideal_steps(real, Mode.FULL)
    for bound in full:
        assert max(bound.longest_chain_s, bound.work_over_capacity_s) <= bound.rollout_s
        assert bound.rollout_s < bound.step_s
    for mode in Mode:
        if mode is not Mode.FULL:
            assert mean_step_s(ideal_steps(real, mode)) > mean_step_s(full)
