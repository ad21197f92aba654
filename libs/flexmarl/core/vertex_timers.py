"""Times at which vertices must be looked at; the driver is asked for one timer, the earliest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import Final

from flexmarl.core.dispatch_records import Vertex

_KEEP_STALE: Final = 64
"""Outdated heap entries that are not worth a rebuild."""


class Due(IntEnum):
    """Why a vertex is looked at."""

    DEADLINE = 0
    """It must have ended."""
    RETRY = 1
    """It may be tried again."""
    HANDOVER = 2
    """Its instance must have given it back."""


class VertexTimers:
    """A heap of times; entries of vertices that ended are dropped when met, or all at once.

    Args:
        is_live: Whether a vertex has not ended.
    """

    def __init__(self, is_live: Callable[[Vertex], bool]) -> None:
        self._is_live = is_live
        self._heap: list[tuple[float, int, Vertex, Due, int]] = []
        self._numbers = 0
        self._armed: float | None = None

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, at: float, vertex: Vertex, due: Due, *, num_live: int) -> float | None:
        """Remembers a time.

        Args:
            at: The time, in seconds.
            vertex: Vertex.
            due: What for.
            num_live: Vertices in progress, which bound the heap.

        Returns:
            The time for which the driver's timer must be set, if that changes.
        """
        if len(self._heap) > 3 * num_live + _KEEP_STALE:
            self._heap[:] = [entry for entry in self._heap if self._is_live(entry[2])]
            heapify(self._heap)
        self._numbers += 1
        heappush(self._heap, (at, self._numbers, vertex, due, vertex.attempt))
        return self._arm()

    def fired(self, now: float) -> Iterator[tuple[Vertex, Due]]:
        """What is due, in order; entries that an ended or newer attempt outdated are left out."""
        self._armed = None
        while self._heap and self._heap[0][0] <= now:
            _, _, vertex, due, attempt = heappop(self._heap)
            if self._is_live(vertex) and (due is Due.DEADLINE or vertex.attempt == attempt):
                yield vertex, due

    def rearm(self) -> float | None:
        """The time for which the timer must be set after it fired."""
        return self._arm()

    def _arm(self) -> float | None:
        if not self._heap:
            return None
        at = self._heap[0][0]
        if self._armed is not None and self._armed <= at:
            return None
        self._armed = at
        return at
