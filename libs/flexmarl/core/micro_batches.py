"""Forming micro-batches: released rows of one policy wait here until there are enough of them."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from flexmarl.core.training_rows import Row


class RowQueue:
    """Released rows of one policy in one batch; rows of the oldest group go first.

    Each row that is added leaves exactly once.

    Args:
        rows_per_micro_batch: Most rows of one.
        tokens_per_micro_batch: Most tokens of one, prompts included; a row with more is one alone.
            None: no such limit.
    """

    def __init__(
        self, *, rows_per_micro_batch: int, tokens_per_micro_batch: int | None = None
    ) -> None:
        if rows_per_micro_batch < 1:
            raise ValueError("a micro-batch needs at least one row")
        self._rows = rows_per_micro_batch
        self._tokens = float("inf") if tokens_per_micro_batch is None else tokens_per_micro_batch
        self._heap: list[tuple[int, str, int, Row]] = []
        self._added = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, rows: Iterable[Row], *, group_ordinal: int) -> None:
        """Add released rows of a group."""
        for row in rows:
            self._added += 1
            self.num_tokens += row.num_tokens
            heappush(self._heap, (group_ordinal, row.vertex_id, self._added, row))

    def form(self, *, flush: bool) -> list[tuple[Row, ...]]:
        """Take whole micro-batches out; with `flush` also the last, partial one."""
        formed: list[tuple[Row, ...]] = []
        while (
            len(self._heap) >= self._rows
            or self.num_tokens >= self._tokens
            or (flush and self._heap)
        ):
            formed.append(self._take())
        return formed

    def _take(self) -> tuple[Row, ...]:
        taken: list[Row] = []
        room = self._tokens
        while self._heap and len(taken) < self._rows:
            row = self._heap[0][3]
            if taken and row.num_tokens > room:
                break
            heappop(self._heap)
            taken.append(row)
            room -= row.num_tokens
            self.num_tokens -= row.num_tokens
        return tuple(taken)
