"""Who holds the slots."""

from __future__ import annotations

from typing import Any

from flexmarl.core.allocation import Allocation, BindSlots, Demand, GiveWay, allocate

ONE = {"t0": ("slot0",)}
TWO = {"t0": ("slot0", "slot1")}


def want(policy: str, work: float, **more: Any) -> Demand:
    return Demand(policy=policy, work=work, world_size=more.pop("world_size", 1), **more)


def held(policy: str, work: float, slot: str = "slot0", **more: Any) -> Demand:
    more.setdefault("trainer", "t0")
    slots = more.pop("slots", (slot,))
    return want(policy, work, slots=slots, world_size=len(slots), **more)


def decide(*demands: Demand, trainers: Any = ONE, residence: float = 0.0, now: float = 10.0):
    return allocate(demands, trainers=trainers, min_residence_s=residence, now=now)


def binds(result: Allocation) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {a.policy: (a.trainer, a.slots) for a in result.actions if isinstance(a, BindSlots)}


def leaves(result: Allocation) -> list[str]:
    return [a.policy for a in result.actions if isinstance(a, GiveWay)]


def test_longest_remaining_work_first() -> None:
    result = decide(want("a", 5), want("b", 9), want("c", 7), trainers=TWO)
    assert binds(result) == {"b": ("t0", ("slot0",)), "c": ("t0", ("slot1",))}


def test_ties_go_by_name_so_that_decisions_repeat() -> None:
    assert list(binds(decide(want("b", 1), want("a", 1)))) == ["a"]


def test_without_work_nobody_is_bound() -> None:
    assert decide(want("a", 0)) == Allocation((), None)


def test_all_or_none() -> None:
    result = decide(want("big", 9, world_size=2), held("a", 1, busy=True), trainers=TWO)
    assert result.actions == ()
    result = decide(want("big", 9, world_size=2), trainers=TWO)
    assert binds(result) == {"big": ("t0", ("slot0", "slot1"))}


def test_slots_kept_for_a_large_policy_are_not_taken_by_a_small_one() -> None:
    result = decide(
        want("big", 9, world_size=2), want("small", 1), held("a", 0, "slot0"), trainers=TWO
    )
    assert leaves(result) == ["a"]
    assert binds(result) == {}


def test_a_policy_with_nothing_to_do_gives_way_at_once() -> None:
    result = decide(want("b", 1), held("a", 0, since=9.9), residence=60.0)
    assert leaves(result) == ["a"]


def test_a_policy_that_expects_rows_keeps_its_residence() -> None:
    demands = want("b", 100), held("a", 0, since=9.0, expects=True)
    result = decide(*demands, residence=5.0)
    assert result == Allocation((), 14.0)
    assert leaves(decide(*demands, residence=5.0, now=14.0)) == ["a"]


def test_preemption_needs_much_more_work() -> None:
    assert leaves(decide(want("b", 19), held("a", 10))) == []
    assert leaves(decide(want("b", 20), held("a", 10))) == ["a"]
    later = decide(want("b", 20), held("a", 10, since=8.0), residence=5.0)
    assert later == Allocation((), 13.0)


def test_no_preemption_within_an_operation() -> None:
    assert decide(want("b", 99), held("a", 0, busy=True)).actions == ()


def test_who_leaves_already_is_waited_for() -> None:
    result = decide(
        want("c", 5),
        held("a", 0, "slot0", busy=True, leaving=True),
        held("b", 0, "slot1"),
        trainers=TWO,
    )
    assert result.actions == ()


def test_an_update_that_ends_soon_spares_the_others() -> None:
    result = decide(
        want("c", 100),
        held("a", 1, "slot0", finishing=True),
        held("b", 10, "slot1"),
        trainers=TWO,
    )
    assert result.actions == ()


def test_two_that_wait_need_two_that_leave() -> None:
    result = decide(
        want("c", 5),
        want("d", 4),
        held("a", 0, "slot0", busy=True, leaving=True),
        held("b", 0, "slot1"),
        trainers=TWO,
    )
    assert leaves(result) == ["b"]


def test_returns_to_its_last_trainer() -> None:
    trainers = {"t0": ("x",), "t1": ("y",)}
    assert binds(decide(want("a", 1, last_trainer="t1"), trainers=trainers)) == {
        "a": ("t1", ("y",))
    }
    assert binds(decide(want("a", 1, last_trainer="gone"), trainers=trainers)) == {
        "a": ("t0", ("x",))
    }


def test_the_fuller_trainer_is_filled_first() -> None:
    trainers = {"t0": ("x", "y"), "t1": ("z",)}
    assert binds(decide(want("a", 1), trainers=trainers)) == {"a": ("t1", ("z",))}


def test_the_cheapest_trainer_makes_room() -> None:
    trainers = {"t0": ("x",), "t1": ("y",)}
    result = decide(
        want("c", 100),
        held("a", 20, "x", trainer="t0"),
        held("b", 10, "y", trainer="t1"),
        trainers=trainers,
    )
    assert leaves(result) == ["b"]


def test_only_as_many_leave_as_are_needed() -> None:
    result = decide(want("c", 5), held("a", 0, "slot0"), held("b", 0, "slot1"), trainers=TWO)
    assert leaves(result) == ["a"]
