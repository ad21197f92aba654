"""Who holds the slots."""

from __future__ import annotations

from typing import Any

from flexmarl.core.allocation import Allocation, BindSlots, GiveWay, allocate
from flexmarl.core.demands import Demand, Place

ONE = {"t0": ("slot0",)}
TWO = {"t0": ("slot0", "slot1")}
FOUR = {"t0": ("s0", "s1", "s2", "s3")}


def want(policy: str, work: float, **more: Any) -> Demand:
    return Demand(policy=policy, work=work, world_size=more.pop("world_size", 1), **more)


def held(policy: str, work: float, slot: str = "slot0", **more: Any) -> Demand:
    more.setdefault("trainer", "t0")
    slots = more.pop("slots", (slot,))
    return want(policy, work, slots=slots, world_size=len(slots), **more)


def decide(*demands: Demand, trainers: Any = ONE, residence: float = 0.0, now: float = 10.0):
    # What is bound ahead of its work has tests of its own.
    return allocate(demands, trainers=trainers, min_residence_s=residence, now=now, ahead=False)


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


def test_what_is_estimated_to_come_counts_as_remaining_work() -> None:
    result = decide(want("a", 5), want("b", 1, remaining=100))
    assert list(binds(result)) == ["b"]
    # 50 at a tenth of the rate take longer than 100.
    result = decide(want("a", 5, remaining=50, rate=0.1), want("b", 1, remaining=100))
    assert list(binds(result)) == ["a"]


def test_slots_that_nobody_waits_for_go_to_who_has_work_for_them() -> None:
    most = {"max_world_size": 4}
    alone = decide(want("a", 8, **most), trainers=FOUR)
    assert binds(alone) == {"a": ("t0", ("s0", "s1", "s2", "s3"))}
    shared = decide(want("a", 30, **most), want("b", 10, **most), trainers=FOUR)
    assert {name: len(slots) for name, (_, slots) in binds(shared).items()} == {"a": 3, "b": 1}
    # What others expect counts, too: their share stays free.
    kept = decide(
        want("a", 10, **most), want("b", 0, remaining=10, expects=True, **most), trainers=FOUR
    )
    assert {name: len(slots) for name, (_, slots) in binds(kept).items()} == {"a": 2}


def test_nobody_is_widened_while_another_one_waits() -> None:
    result = decide(
        want("a", 50, max_world_size=3),
        want("big", 1, world_size=4),
        trainers=FOUR,
    )
    assert {name: len(slots) for name, (_, slots) in binds(result).items()} == {"a": 1}


def test_a_bound_policy_is_widened_when_that_pays_for_the_swap() -> None:
    def after(swap_s: float, **more: Any) -> Allocation:
        holder = held("a", 90, "s0", max_world_size=4, swap_s=swap_s, **more)
        return decide(holder, trainers=FOUR)

    # 90 s on one slot, 90 / (4 x 0.9^3) = 31 s on four.
    assert leaves(after(29.0)) == ["a"]
    assert leaves(after(30.0)) == []
    assert leaves(after(0.0, busy=True)) == []
    idle = held("a", 0, "s0", remaining=90, max_world_size=4, expects=True)
    assert leaves(decide(idle, trainers=FOUR)) == []
    assert leaves(decide(held("a", 9, "s0"), trainers=FOUR)) == []


def test_policies_without_ready_work_make_room_for_a_wider_one() -> None:
    three = {"t0": ("s0", "s1", "s2")}

    def after(*others: Demand, swap_s: float = 1.0) -> list[str]:
        holder = held("a", 60, "s0", remaining=90, max_world_size=3, swap_s=swap_s)
        return leaves(decide(holder, *others, trainers=three))

    # Of 120 s in all, 90 are two slots' of three; two save it 40 s of its 90.
    idle = held("b", 0, "s1", remaining=20, swap_s=1.0, expects=True)
    small = held("c", 0, "s2", remaining=10, swap_s=1.0, expects=True)
    assert after(idle, small) == ["a", "b"]
    assert after(idle, small, swap_s=18.0) == ["a", "b"]
    assert after(idle, small, swap_s=19.0) == [], "both pay for their ways"
    through = held("b", 0, "s1", swap_s=9.0)
    other = held("c", 0, "s2", remaining=40, swap_s=1.0, expects=True)
    assert after(through, other, swap_s=19.0) == ["a", "b"], "who is through does not come back"
    assert after(held("b", 1, "s1"), held("c", 1, "s2")) == []


def test_who_is_soon_through_is_not_swapped_out() -> None:
    waiting = want("b", 40, swap_s=5.0)
    assert leaves(decide(waiting, held("a", 4, swap_s=5.0))) == []
    assert leaves(decide(waiting, held("a", 6, swap_s=5.0))) == ["a"]
    wide = held("a", 8, slots=("slot0", "slot1"), swap_s=5.0)  # 8 s of one slot, 4.4 s of two
    assert leaves(decide(waiting, wide, trainers=TWO)) == []


def test_a_swap_waits_until_the_work_is_worth_it_or_all_there() -> None:
    idle = held("a", 0, expects=True, idle_since=9.0)
    assert leaves(decide(want("b", 4, swap_s=5.0, expects=True), idle)) == []
    assert leaves(decide(want("b", 5, swap_s=5.0, expects=True), idle)) == ["a"]
    assert leaves(decide(want("b", 1, swap_s=5.0), idle)) == ["a"]


def test_who_has_been_idle_as_long_as_the_swaps_take_leaves_for_anybody() -> None:
    little = want("b", 4, swap_s=5.0, expects=True)
    idle = held("a", 0, expects=True, swap_s=2.0, idle_since=4.0)
    early = decide(little, idle, now=10.0)
    assert (early.actions, early.look_again_at) == ((), 11.0)
    assert leaves(decide(little, idle, now=11.0)) == ["a"]
    assert decide(little, idle, now=11.0, residence=20.0).look_again_at == 20.0
    busy = held("a", 1, expects=True, swap_s=2.0, idle_since=4.0, remaining=90.0)
    assert decide(little, busy, now=99.0).look_again_at is None


def test_a_place_of_its_own_is_waited_for_and_never_taken() -> None:
    place = Place("t0", ("slot1",))
    assert binds(decide(want("a", 1, places=(place,)), trainers=TWO)) == {"a": ("t0", ("slot1",))}
    assert decide(want("a", 1, places=(place,)), trainers={}).actions == ()
    taken = held("b", 0, "slot1")
    assert decide(want("a", 9, places=(place,)), taken, trainers=TWO).actions == ()
    # Who has none is served first, and does not drive away who has one.
    frozen = want("frozen", 1)
    result = decide(want("a", 9, places=(Place("t0", ("slot0",)),)), frozen)
    assert list(binds(result)) == ["frozen"]
    assert leaves(decide(frozen, held("a", 0, places=(Place("t0", ("slot0",)),)))) == []


ONES = {"t0": ("slot0",), "t1": ("slot0",), "t2": ("slot0",)}


def wide(policy: str, work: float, world_size: int, **more: Any) -> Demand:
    return want(policy, work, world_size=world_size, spans=True, **more)


def over(policy: str, work: float, *trainers: str, **more: Any) -> Demand:
    """Bound to `slot0` of each of these trainers."""
    beyond = tuple(Place(name, ("slot0",)) for name in trainers[1:])
    return wide(
        policy,
        work,
        len(trainers),
        trainer=trainers[0],
        slots=("slot0",),
        beyond=beyond,
        **more,
    )


def places(result: Allocation) -> dict[str, list[Place]]:
    return {
        a.policy: [Place(a.trainer, a.slots), *a.beyond]
        for a in result.actions
        if isinstance(a, BindSlots)
    }


def test_a_policy_larger_than_every_trainer_lies_on_as_few_as_possible() -> None:
    trainers = {"t0": ("a",), "t1": ("b", "c"), "t2": ("d", "e", "f")}
    result = decide(wide("p", 9, 5), trainers=trainers)
    assert places(result) == {"p": [Place("t2", ("d", "e", "f")), Place("t1", ("b", "c"))]}
    assert "5 free slot(s) of 2 trainers" in result.actions[0].reason
    # A device is (trainer, slot): equal names of slots are different devices.
    result = decide(wide("p", 9, 2), want("q", 1), trainers=ONES)
    assert places(result) == {
        "p": [Place("t0", ("slot0",)), Place("t1", ("slot0",))],
        "q": [Place("t2", ("slot0",))],
    }


def test_the_trainer_that_led_leads_again() -> None:
    result = decide(wide("p", 9, 2, last_trainer="t2"), trainers=ONES)
    assert places(result) == {"p": [Place("t2", ("slot0",)), Place("t0", ("slot0",))]}
    result = decide(
        wide("p", 9, 1, last_trainer="t2"), over("q", 1, "t2", busy=True), trainers=ONES
    )
    assert places(result) == {"p": [Place("t0", ("slot0",))]}


def test_ranks_stay_within_a_trainer_that_has_room_for_all() -> None:
    trainers = {"t0": ("a",), "t1": ("b", "c")}
    busy = held("q", 1, "b", trainer="t1", busy=True)
    assert decide(want("p", 9, world_size=2), busy, trainers=trainers).actions == ()


def test_who_spans_trainers_gets_all_slots_or_none() -> None:
    result = decide(wide("p", 9, 3), held("q", 1, trainer="t1", busy=True), trainers=ONES)
    assert result.actions == ()
    result = decide(wide("p", 9, 3), want("r", 1), held("q", 0, trainer="t1"), trainers=ONES)
    assert leaves(result) == ["q"]
    assert binds(result) == {}, "the free ones are kept for it"
    assert decide(wide("p", 9, 4), trainers=ONES).actions == ()


def test_who_spans_trainers_gives_all_of_them_back() -> None:
    bound = over("p", 0, "t0", "t1")
    assert bound.num_slots == 2
    assert leaves(decide(wide("q", 5, 3), bound, trainers=ONES)) == ["p"]
    assert leaves(decide(want("q", 5), want("r", 4), bound, trainers=ONES)) == ["p"]
    both = decide(want("q", 5), want("r", 4), want("s", 3), bound, trainers=ONES)
    assert leaves(both) == ["p"], "its second slot is counted on, too"
    on_its_way = over("p", 0, "t0", "t1", busy=True, leaving=True)
    assert decide(wide("q", 5, 2), on_its_way, trainers=ONES).actions == ()


def test_who_spans_trainers_is_not_widened() -> None:
    trainers = {"t0": ("a", "b"), "t1": ("c", "d")}
    result = decide(wide("p", 9, 3, max_world_size=4), trainers=trainers)
    assert places(result) == {"p": [Place("t0", ("a", "b")), Place("t1", ("c",))]}
    bound = over("p", 99, "t0", "t1", max_world_size=3)
    assert decide(bound, trainers=ONES).actions == ()


def test_who_spans_trainers_leaves_once_for_all_that_are_widened() -> None:
    trainers = {"t0": ("slot0", "a", "c"), "t1": ("slot0", "b", "d")}
    result = decide(
        over("p", 0, "t0", "t1"),
        held("q", 99, "a", trainer="t0", max_world_size=2),
        held("r", 99, "b", trainer="t1", max_world_size=2),
        held("s", 0, "c", trainer="t0", busy=True),
        held("t", 0, "d", trainer="t1", busy=True),
        trainers=trainers,
    )
    assert leaves(result) == ["q", "p"], "r finds p's other slot free a moment later"


def test_a_place_over_trainers_is_all_there_or_waited_for() -> None:
    kept = (Place("t0", ("slot0",)), Place("t1", ("slot0",)))
    assert places(decide(wide("p", 9, 2, places=kept), trainers=ONES)) == {"p": [*kept]}
    taken = held("q", 0, trainer="t1")
    assert decide(wide("p", 9, 2, places=kept), taken, trainers=ONES).actions == ()
    assert decide(wide("p", 9, 2, places=kept), trainers=ONE).actions == ()
