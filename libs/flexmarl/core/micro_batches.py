"""Forming micro-batches: released rows of one policy wait here until there are enough of them."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from flexmarl.core.training_rows import Row


class RowQueue:
    """Released rows of one policy in one batch; rows of the oldest group go first.

    Each row that is added leaves exactly once.
    """

    def __init__(self, *, rows_per_micro_batch: int) -> None:
        if rows_per_micro_batch < 1:
            raise ValueError("a micro-batch needs at least one row")
        self._size = rows_per_micro_batch
        self._heap: list[tuple[int, str, int, Row]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, rows: Iterable[Row], *, group_ordinal: int) -> None:
        """Add released rows of a group."""
        for row in rows:
            self._added += 1
            heappush(self._heap, (group_ordinal, row.vertex_id, self._added, row))

    def form(self, *, flush: bool) -> list[tuple[Row, ...]]:
        """Take whole micro-batches out; with `flush` also the last, partial one."""
        formed: list[tuple[Row, ...]] = []
        while len(self._heap) >= self._size or (flush and self._heap):
            count = min(self._size, len(self._heap))
            formed.append(tuple(heappop(self._heap)[3] for _ in range(count)))
        return formed
