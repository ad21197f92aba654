"""Slots that are kept for one policy each, for the whole run (static allocation)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexmarl.core.demands import Place


class Places:
    """Found once all trainers are known; a place never changes again.

    Args:
        sizes: Slots that each policy needs, by name, who chooses first in front.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._places: dict[str, tuple[Place, ...]] = {}

    def of(self, policy: str) -> tuple[Place, ...]:
        """The place of a policy, the leading trainer first; empty while it has none."""
        return self._places.get(policy, ())

    def find(self, trainers: Mapping[str, Sequence[str]]) -> None:
        """Keeps slots for who has no place yet; of several trainers where none has enough.

        Args:
            trainers: All trainers of the run, for a place is not changed when another one opens.
        """
        for trainer, slots in sorted(trainers.items()):
            for policy, size in self._without():
                free = self._free(trainer, slots)
                if size <= len(free):
                    self._places[policy] = (Place(trainer, tuple(free[:size])),)
        for policy, size in self._without():
            self._find_over(trainers, policy, size)

    def _find_over(self, trainers: Mapping[str, Sequence[str]], policy: str, needed: int) -> None:
        free = {name: self._free(name, slots) for name, slots in trainers.items()}
        places: list[Place] = []
        for name in sorted(free, key=lambda name: (-len(free[name]), name)):
            chosen = tuple(free[name][:needed])
            needed -= len(chosen)
            if chosen:
                places.append(Place(name, chosen))
        if not needed:
            self._places[policy] = tuple(places)

    def _without(self) -> list[tuple[str, int]]:
        return [(name, size) for name, size in self._sizes.items() if name not in self._places]

    def _free(self, trainer: str, slots: Sequence[str]) -> list[str]:
        """Slots of a trainer that are kept for nobody."""
        places = (place for kept in self._places.values() for place in kept)
        taken = {slot for place in places if place.trainer == trainer for slot in place.slots}
        return [slot for slot in slots if slot not in taken]
