"""What policies want of the trainers' slots, and what they hold. A device is (trainer, slot)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PREEMPT_RATIO = 2.0
"""A policy leaves for one that has so many times its work."""
WIDEN_RATIO = 2.0
"""More slots have to save so many times what the swaps cost."""


@dataclass(frozen=True, slots=True)
class Place:
    """Slots of one trainer."""

    trainer: str
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One policy, as the allocation sees it.

    Attributes:
        policy: Its name.
        world_size: Slots that it needs.
        max_world_size: Most slots that it can use; below `world_size` means just those.
        spans: Whether no trainer has as many slots as it needs, so that its ranks lie on several.
        work: Ready work (tokens; an update or a first binding counts 1); 0 when there is none.
        remaining: Estimate of all its work that is left in the batch, in tokens.
        rate: Tokens per second on one slot.
        swap_s: What taking it off its slots and on again costs, in seconds.
        expects: Whether more work may come in this batch.
        trainer: Trainer that it is bound to, the leading one of several; None when it is not.
        slots: Slots that it holds there.
        beyond: Slots that it holds of further trainers.
        since: When it was bound.
        idle_since: When its last operation ended.
        busy: Whether an operation runs on it.
        leaving: Whether it is giving its slots back already.
        finishing: Whether its update is all that is left: its slots come free by themselves, and
            nobody else has to leave in the middle of his work.
        last_trainer: Trainer that held it last; its state may still be warm there.
        places: Slots kept for it, those of the leading trainer first; empty where slots go where
            work is.
    """

    policy: str
    world_size: int
    work: float
    max_world_size: int = 0
    spans: bool = False
    remaining: float = 0.0
    rate: float = 1.0
    swap_s: float = 0.0
    expects: bool = False
    trainer: str | None = None
    slots: tuple[str, ...] = ()
    beyond: tuple[Place, ...] = ()
    since: float = 0.0
    idle_since: float = 0.0
    busy: bool = False
    leaving: bool = False
    finishing: bool = False
    last_trainer: str | None = None
    places: tuple[Place, ...] = ()

    @property
    def num_slots(self) -> int:
        """Slots that it holds, of all trainers."""
        return len(self.slots) + sum(len(place.slots) for place in self.beyond)

    def held_on(self, trainer: str) -> tuple[str, ...]:
        """Slots of one trainer that it holds."""
        held = (self.slots if self.trainer == trainer else (), *_slots_of(self.beyond, trainer))
        return tuple(slot for slots in held for slot in slots)

    @property
    def remaining_s(self) -> float:
        """Seconds of one slot that its remaining work takes."""
        return max(self.remaining, self.work) / self.rate

    @property
    def worth_a_swap(self) -> bool:
        """Whether its ready work outweighs a swap, or will not grow any more."""
        return not self.expects or self.work / self.rate >= self.swap_s


def _slots_of(places: tuple[Place, ...], trainer: str) -> list[tuple[str, ...]]:
    return [place.slots for place in places if place.trainer == trainer]


def share_of(demand: Demand, everyone: Sequence[Demand], *, num_slots: int) -> int:
    """Slots, of so many, that a policy should hold by its part of the work that is left."""
    most = max(demand.max_world_size, demand.world_size)
    total_s = sum(other.remaining_s for other in everyone)
    fair = round(num_slots * demand.remaining_s / total_s) if total_s else 0
    return min(max(fair, demand.world_size), most)
