"""Who holds the slots of a trainer that has nothing to do: whose rows are expected.

Slots lie idle from the start of a batch until its first groups close, and again when all released
rows are trained on. A policy that is bound meanwhile does not load its state when its rows come.
Who has most work to come goes first and gets its share; a policy leaves for one that has
`PREEMPT_RATIO` times as much to come, and makes itself wider where that saves `WIDEN_RATIO` times
the swap. Both thresholds keep estimates that change a little from swapping the two to and fro. A
wrong guess costs a swap in idle time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexmarl.core.demands import PREEMPT_RATIO, WIDEN_RATIO, Demand, share_of
from flexmarl.core.slot_rooms import Room
from flexmarl.core.training_estimates import speed


@dataclass(frozen=True, slots=True)
class Ahead:
    """One step towards the slots as they should lie.

    Attributes:
        demand: Policy that is to have them.
        num_slots: Number of slots that it is bound to now; 0 when others have to leave first.
        leaving: Policies that leave for it; itself when it is bound to fewer.
    """

    demand: Demand
    num_slots: int
    leaving: tuple[Demand, ...] = ()


def bind_ahead(room: Room, everyone: Sequence[Demand]) -> Ahead | None:
    """Returns the next step in a trainer where nobody has work, or None.

    Args:
        room: Slots of the trainer, after all that have work were served.
        everyone: All policies of the run.
    """
    if room.coming or any(d.work or d.busy for d in everyone if room.count_of(d)):
        return None
    left = room.size
    for demand in sorted(everyone, key=lambda d: (-d.remaining_s, d.policy)):
        if not _comes(demand, room):
            continue
        wanted = min(share_of(demand, everyone, num_slots=room.size), left)
        if wanted < demand.world_size:
            continue
        left -= wanted
        step = _step(demand, wanted, room)
        if step is not None:
            return step
    return None


def _comes(demand: Demand, room: Room) -> bool:
    """Whether work of this policy is expected here, and it waits for nothing else."""
    trainer = demand.trainer or demand.last_trainer
    elsewhere = trainer not in (None, room.trainer) or demand.spans or demand.places
    return bool(demand.expects and demand.remaining and not demand.work and not elsewhere)


def _step(demand: Demand, wanted: int, room: Room) -> Ahead | None:
    held = room.count_of(demand)
    there = held + room.num_free
    leaving: list[Demand] = []
    for other in sorted(room.holders, key=lambda d: (d.remaining_s, d.policy)):
        if there < wanted and other is not demand and _outweighs(demand, other):
            leaving.append(other)
            there += room.count_of(other)
    num_slots = min(wanted, there)
    if num_slots <= held or num_slots < demand.world_size:
        return None
    if held:
        saved_s = demand.remaining_s * (1 / speed(held) - 1 / speed(num_slots))
        if saved_s <= WIDEN_RATIO * demand.swap_s:
            return None
        leaving.append(demand)
    return Ahead(demand, 0 if leaving else num_slots, tuple(leaving))


def _outweighs(demand: Demand, other: Demand) -> bool:
    return demand.remaining_s >= PREEMPT_RATIO * other.remaining_s
