"""Whose state is loaded ahead of its turn, and where: beside what the slots compute now.

The policy that gets slots next is the one that `allocate` would serve first. Its slots are those
that come free first. A wrong guess costs a copy that nobody needed; nothing depends on it. A policy
over several trainers gets no hint: what its ranks load comes from the leading one's node, through
the group that they make.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flexmarl.core.allocation import BindSlots, waiting_in_order
from flexmarl.core.demands import Demand


def foresee(
    demands: Iterable[Demand], *, trainers: Mapping[str, Sequence[str]]
) -> BindSlots | None:
    """Returns the binding that is made next, when one waits for slots that others hold.

    Args:
        demands: All policies of the run.
        trainers: Slots of each trainer that can be used now.
    """
    everyone = list(demands)
    for demand in waiting_in_order(everyone):
        trainer = _trainer_of(demand, trainers)
        if trainer is None:
            continue
        slots = _next_slots(demand, trainer, trainers[trainer], everyone)
        if slots is not None:
            return BindSlots(demand.policy, trainer, slots, "it gets these slots next")
    return None


def _trainer_of(demand: Demand, trainers: Mapping[str, Sequence[str]]) -> str | None:
    if demand.spans or len(demand.places) > 1:
        return None
    if demand.places:
        place = demand.places[0]
        return place.trainer if place.trainer in trainers else None
    large = [name for name in sorted(trainers) if len(trainers[name]) >= demand.world_size]
    if demand.last_trainer in large:
        return demand.last_trainer
    return large[0] if large else None


def _next_slots(
    demand: Demand, trainer: str, slots: Sequence[str], everyone: Sequence[Demand]
) -> tuple[str, ...] | None:
    """The slots that come free first, in the trainer's order."""
    if demand.places:
        return demand.places[0].slots
    holders = {slot: d for d in everyone for slot in d.held_on(trainer)}
    ordered = sorted(
        (slot for slot in slots if slot not in holders or not holders[slot].places),
        key=lambda slot: _stays(holders.get(slot)),
    )
    if len(ordered) < demand.world_size:
        return None
    chosen = set(ordered[: demand.world_size])
    return tuple(slot for slot in slots if slot in chosen)


def _stays(holder: Demand | None) -> tuple[bool, bool, float, float]:
    """How long a slot stays with its holder, in the order in which `allocate` asks for it."""
    if holder is None:
        return (False, False, 0.0, 0.0)
    leaves = holder.leaving or holder.finishing
    return (True, not leaves, holder.work + holder.expects, holder.since)
