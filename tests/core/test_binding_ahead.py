"""Who is bound before there is work."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from flexmarl.core.allocation import BindSlots, allocate
from flexmarl.core.demands import Demand, Place

TRAINER = "t0"


def coming(policy: str, remaining: float, *, slots: tuple[str, ...] = (), **more: Any) -> Demand:
    """A policy without ready work, of which some is expected."""
    wanted: dict[str, Any] = {
        "work": 0.0, "world_size": 1, "expects": True, "trainer": TRAINER if slots else None,
    }  # fmt: skip
    return Demand(policy=policy, remaining=remaining, slots=slots, **wanted | more)


def decide(*demands: Demand, num_slots: int = 2, **more: Any) -> dict[str, Any]:
    """Slots that policies are bound to; None for one that leaves."""
    slots = tuple(f"s{number}" for number in range(num_slots))
    trainers = more.pop("trainers", {TRAINER: slots})
    done = allocate(demands, trainers=trainers, min_residence_s=0.0, now=10.0, **more)
    return {a.policy: a.slots if isinstance(a, BindSlots) else None for a in done.actions}


def test_who_has_most_to_come_is_bound_first() -> None:
    assert decide(coming("a", 5), coming("b", 9)) == {"b": ("s0",)}
    assert decide(coming("a", 5), coming("b", 9, slots=("s0",))) == {"a": ("s1",)}


def test_it_gets_its_share() -> None:
    wide = coming("a", 90, max_world_size=4)
    assert decide(wide, coming("b", 30), num_slots=4) == {"a": ("s0", "s1", "s2")}


def test_nobody_is_bound_ahead_where_devices_serve_both_phases() -> None:
    assert decide(coming("a", 5), ahead=False) == {}


def test_the_one_with_much_less_to_come_leaves() -> None:
    assert decide(coming("a", 10), coming("b", 5, slots=("s0",)), num_slots=1) == {"b": None}
    assert decide(coming("a", 9), coming("b", 5, slots=("s0",)), num_slots=1) == {}


def test_a_bound_one_is_widened_when_that_pays_for_the_swap() -> None:
    def wide(swap_s: float) -> Demand:
        return coming("a", 90, slots=("s0",), max_world_size=2, swap_s=swap_s)

    # 90 s on one slot, 90 / (2 x 0.9) = 50 s on two.
    assert decide(wide(19.0)) == {"a": None}
    assert decide(wide(20.0)) == {}
    both = decide(wide(1.0), coming("b", 10, slots=("s1",)))
    assert both == {"a": None, "b": None}


@pytest.mark.parametrize(
    "other",
    [
        coming("b", 1, slots=("s1",), work=5.0),
        coming("b", 1, slots=("s1",), busy=True),
        coming("b", 1, slots=("s1",), leaving=True),
    ],
    ids=["has work", "busy", "leaving"],
)
def test_a_trainer_with_something_to_do_is_left_alone(other: Demand) -> None:
    assert decide(coming("a", 9), other, num_slots=3) == {}


@pytest.mark.parametrize(
    "more",
    [
        {"expects": False},
        {"remaining": 0.0},
        {"places": (Place("t1", ("s0",)),)},
        {"spans": True},
        {"last_trainer": "t1"},
        {"world_size": 3},
    ],
    ids=str,
)
def test_who_is_not_expected_here_is_not_bound(more: dict[str, Any]) -> None:
    assert decide(replace(coming("a", 9), **more)) == {}


def test_one_trainer_after_the_other() -> None:
    trainers = {"t0": ("s0",), "t1": ("s0",)}
    full = coming("a", 9, slots=("s0",))
    assert decide(full, coming("b", 8), trainers=trainers) == {"b": ("s0",)}
    assert decide(full, replace(full, policy="b", trainer="t1"), trainers=trainers) == {}


@pytest.mark.parametrize("seed", range(50))
def test_it_comes_to_rest(seed: int) -> None:
    rng = Random(seed)
    policies = {
        name: coming(name, rng.choice([0, rng.uniform(1, 200)]), max_world_size=rng.randint(1, 4))
        for name in "abcdef"
    }
    num_slots = rng.randint(1, 6)
    for _ in range(30):
        done = decide(*policies.values(), num_slots=num_slots)
        if not done:
            break
        for name, slots in done.items():
            trainer = None if slots is None else TRAINER
            policies[name] = replace(policies[name], slots=slots or (), trainer=trainer)
    else:
        pytest.fail(f"still swapping: {policies}")
    held = [slot for p in policies.values() for slot in p.slots]
    assert len(held) == len(set(held)) <= num_slots
    wanted = sum(1 for p in policies.values() if p.remaining)
    assert len(held) >= min(wanted, num_slots)
