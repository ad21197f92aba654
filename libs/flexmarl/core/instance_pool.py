"""The instances of a run: which may take a request now, and which of them has the least to do.

Load is outstanding work in tokens. The least loaded instance of a lane is the top of a heap whose
entries carry the instance's stamp; every change of an instance outdates its entries, which are
dropped when met, and all at once when they prevail. Ties are broken by the seeded generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from random import Random
from typing import Final

from flexmarl.core.dispatch_records import Instance, Lane

_KEEP_STALE: Final = 64
"""Outdated heap entries that are not worth a rebuild."""

_Entry = tuple[int, float, int, Instance]
"""Load, tie, stamp, instance."""


class InstancePool:
    """See the module.

    Args:
        rng: Breaks ties.
        weights: Content that each lane's instances must hold (I11); read, not kept.
    """

    def __init__(self, rng: Random, weights: Mapping[Lane, str]) -> None:
        self._rng = rng
        self._weights = weights
        self._instances: dict[str, Instance] = {}
        self._free: dict[Lane, list[_Entry]] = {}
        self._stamps = 0

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def get(self, instance_id: str) -> Instance | None:
        """An instance by id."""
        return self._instances.get(instance_id)

    def add(self, instance_id: str) -> Instance:
        """A new instance."""
        instance = self._instances[instance_id] = Instance(instance_id)
        return instance

    def remove(self, instance: Instance) -> None:
        """Forgets an instance."""
        del self._instances[instance.instance_id]
        self.touch(instance)

    def forget_lane(self, lane: Lane) -> None:
        """No vertex of this lane will be sent any more."""
        self._free.pop(lane, None)

    def serves(self, instance: Instance, lane: Lane) -> bool:
        """Whether an instance holds what a lane's vertices need."""
        policy, version = lane
        return (
            instance.version == version
            and policy in instance.policies
            and self._weights.get(lane) == instance.weights_hash
        )

    def touch(self, instance: Instance) -> None:
        """Outdates the heap entries of an instance."""
        self._stamps += 1
        instance.stamp = self._stamps

    def offer(self, instance: Instance) -> None:
        """Makes a changed instance findable, where it may take one more request."""
        self.touch(instance)
        if not instance.is_open:
            return
        for policy in instance.policies:
            lane = (policy, instance.version)
            if self._weights.get(lane) != instance.weights_hash:
                continue
            heap = self._free.get(lane)
            if heap is None:
                heap = self._free[lane] = []
            elif len(heap) > 2 * len(self._instances) + _KEEP_STALE:
                heap[:] = [entry for entry in heap if entry[3].stamp == entry[2]]
                heapify(heap)
            heappush(heap, (instance.load, self._rng.random(), instance.stamp, instance))

    def least_loaded(self, lane: Lane, *, avoid: str | None) -> Instance | None:
        """The least loaded open instance, another one than `avoid` where there is one."""
        heap = self._free.get(lane)
        avoided: _Entry | None = None
        found: Instance | None = None
        while heap:
            entry = heap[0]
            instance = entry[3]
            if instance.stamp != entry[2]:
                heappop(heap)
            elif instance.instance_id == avoid and avoided is None:
                avoided = heappop(heap)
            else:
                found = instance
                break
        if avoided is not None:
            assert heap is not None
            heappush(heap, avoided)
            return found or avoided[3]
        return found

    def least_busy(self, lane: Lane) -> Instance | None:
        """The serving instance with the fewest requests, open or not, that nobody reserved."""
        able = (
            instance
            for instance in self._instances.values()
            if instance.usable
            and not instance.vacating
            and instance.reserved is None
            and self.serves(instance, lane)
        )
        return min(able, key=lambda i: (len(i.running), i.instance_id), default=None)
