"""Ready vertices that wait for an instance, by lane, in the order in which they shall go.

The oldest open group goes first; in it the vertex with the longest expected path to the end of its
sample, because that path decides when the group closes; waiting counts as if the path were longer,
so that no short path starves. All waiting vertices age alike, so ageing shows in the order as the
time at which a vertex became ready: orders never change while they wait.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from flexmarl.core.dispatch_records import Lane, Order, Vertex

_KEEP_STALE: Final = 64
"""Outdated heap entries that are not worth a rebuild."""


def urgency(*, ready_at: float, path_tokens: float, ageing_tokens_per_s: float) -> float:
    """Rank within a group: smaller goes first.

    Args:
        ready_at: When the vertex became ready, in seconds.
        path_tokens: Expected tokens from its start to the end of its sample.
        ageing_tokens_per_s: What a second of waiting is worth.
    """
    return ready_at * ageing_tokens_per_s - path_tokens


class ReadyQueues:
    """One heap per lane; entries of vertices that left are dropped when met, or all at once."""

    def __init__(self) -> None:
        self._heaps: dict[Lane, list[tuple[Order, int, Vertex]]] = {}
        self._counts: dict[Lane, int] = {}
        self._pushes = 0  # a vertex that comes back may meet its own old entry

    def push(self, vertex: Vertex) -> None:
        """Puts a vertex in."""
        vertex.waiting = True
        lane = vertex.lane
        heap = self._heaps.get(lane)
        if heap is None:
            heap = self._heaps[lane] = []
            self._counts[lane] = 0
        self._pushes += 1
        heappush(heap, (vertex.order, self._pushes, vertex))
        self._counts[lane] += 1

    def is_empty(self, lane: Lane) -> bool:
        """Whether nothing waits in a lane."""
        return lane not in self._heaps

    def first(self, lane: Lane) -> Vertex | None:
        """The vertex that goes next."""
        heap = self._heaps.get(lane)
        while heap:
            vertex = heap[0][2]
            if vertex.waiting:
                return vertex
            heappop(heap)
        return None

    def take_out(self, vertex: Vertex) -> None:
        """Takes a waiting vertex out, wherever it is."""
        lane = vertex.lane
        vertex.waiting = False
        left = self._counts[lane] - 1
        if left == 0:
            del self._counts[lane], self._heaps[lane]
            return
        self._counts[lane] = left
        heap = self._heaps[lane]
        if heap[0][2] is vertex:
            heappop(heap)
        elif len(heap) > 2 * left + _KEEP_STALE:
            heap[:] = [entry for entry in heap if entry[2].waiting]
            heapify(heap)

    def lanes_of(self, policy: str) -> list[Lane]:
        """Lanes of a policy with waiting vertices, oldest version first."""
        if len(self._heaps) < 2:  # the usual case, and a hot one
            return [lane for lane in self._heaps if lane[0] == policy]
        return sorted(lane for lane in self._heaps if lane[0] == policy)
