"""Slots while a decision over them is made: free ones, and those that will be when somebody left.

A `Room` is one trainer's. A `Hall` is all of them as one, for a policy with more ranks than any
trainer has slots. What is taken in one is gone from the other, for a hall keeps nothing of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flexmarl.core.demands import Demand, Place


class Room:
    """Slots of one trainer.

    Attributes:
        trainer: Its name.
        size: Number of its slots.
        free: Slots that nobody holds.
        coming: Number of those that are being given back.
        holders: Policies that could be asked to leave, the first one first.
    """

    def __init__(self, trainer: str, slots: Sequence[str], bound: Sequence[Demand]) -> None:
        here = [d for d in bound if d.held_on(trainer)]
        held = {slot for d in here for slot in d.held_on(trainer)}
        self.trainer = trainer
        self.size = len(slots)
        self.free = [slot for slot in slots if slot not in held]
        self.coming = sum(self.count_of(d) for d in here if d.leaving or d.finishing)
        self.holders = sorted(
            (d for d in here if not (d.leaving or d.finishing or d.busy or d.places)), key=_rank
        )

    @property
    def num_free(self) -> int:
        """Number of slots that nobody holds."""
        return len(self.free)

    def count_of(self, demand: Demand) -> int:
        """Number of these slots that a policy holds."""
        return len(demand.held_on(self.trainer))

    def take(self, count: int) -> list[Place]:
        """Takes free slots."""
        taken, self.free = self.free[:count], self.free[count:]
        return [Place(self.trainer, tuple(taken))]

    def has(self, slots: Collection[str]) -> bool:
        """Whether these slots are free."""
        return set(slots) <= set(self.free)

    def take_place(self, slots: Collection[str]) -> None:
        """Takes these slots."""
        self.free = [slot for slot in self.free if slot not in slots]

    def vacate(self, leaving: Collection[Demand]) -> None:
        """Counts on the slots of policies that are asked to leave, whoever they are for."""
        self.coming += sum(self.count_of(d) for d in self.holders if d in leaving)
        self.holders = [d for d in self.holders if d not in leaving]

    def keep(self, count: int) -> int:
        """Keeps free and coming slots for somebody, so that nobody behind counts on them.

        Returns:
            How many of the count are not here.
        """
        from_free = min(count, len(self.free))
        from_coming = min(count - from_free, self.coming)
        self.free = self.free[from_free:]
        self.coming -= from_coming
        return count - from_free - from_coming


class Hall:
    """The slots of all trainers, taken from as few of them as possible.

    Args:
        rooms: One per trainer.
        first: Trainer that is to lead if it has a free slot.
    """

    trainer = ""

    def __init__(self, rooms: Sequence[Room], *, first: str | None) -> None:
        self._rooms = sorted(rooms, key=lambda r: (r.trainer != first, -r.num_free, r.trainer))

    @property
    def num_free(self) -> int:
        """Number of slots that nobody holds."""
        return sum(room.num_free for room in self._rooms)

    @property
    def coming(self) -> int:
        """Number of those that are being given back."""
        return sum(room.coming for room in self._rooms)

    @property
    def holders(self) -> list[Demand]:
        """Policies that could be asked to leave, the first one first."""
        found = {d.policy: d for room in self._rooms for d in room.holders}
        return sorted(found.values(), key=_rank)

    def count_of(self, demand: Demand) -> int:
        """Number of slots that a policy holds."""
        return sum(room.count_of(demand) for room in self._rooms)

    def take(self, count: int) -> list[Place]:
        """Takes free slots, of the leading trainer first."""
        places: list[Place] = []
        for room in self._rooms:
            if count and room.num_free:
                places += room.take(count)
                count -= len(places[-1].slots)
        return places

    def keep(self, count: int) -> int:
        """See `Room.keep`."""
        for room in self._rooms:
            count = room.keep(count)
        return count


def _rank(demand: Demand) -> tuple[float, bool, float, str]:
    return demand.work, demand.expects, demand.since, demand.policy
