"""How many queries, and samples of one, are in progress at once.

Both bounds are optional: without them samples start as they come, and the room in the workers
pushes back. The oldest query goes first; further ones begin when one has ended, so that groups
close one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Query:
    order: tuple[int, int]
    running: set[str] = field(default_factory=set)
    waiting: dict[str, None] = field(default_factory=dict)


class Admission:
    """Samples that may start now; a sample keeps its place until it ended.

    Args:
        max_queries: Most groups in progress (FlexMARL, arXiv 2602.09578: 4); None: no bound.
        max_samples_per_query: Most samples of one group in progress (there: 16); None: no bound.
    """

    def __init__(
        self, *, max_queries: int | None = None, max_samples_per_query: int | None = None
    ) -> None:
        self._max_queries = max_queries
        self._max_samples = max_samples_per_query
        self._queries: dict[str, _Query] = {}
        self._query_of: dict[str, _Query] = {}

    @property
    def num_waiting(self) -> int:
        """Samples that wait."""
        return sum(len(query.waiting) for query in self._queries.values())

    def offer(self, sample_id: str, *, group_id: str, order: tuple[int, int]) -> list[str]:
        """Lets a sample wait for its place.

        Args:
            sample_id: Sample.
            group_id: Its group.
            order: Age of the group: smaller is older.

        Returns:
            Samples that may start now; a sample that has a place already may start again.
        """
        query = self._queries.get(group_id)
        if query is None:
            query = self._queries[group_id] = _Query(order)
        if sample_id in query.running:
            return [sample_id]
        self._query_of[sample_id] = query
        if self._max_queries is None and self._max_samples is None:
            query.running.add(sample_id)
            return [sample_id]
        query.waiting[sample_id] = None
        return self._fill()

    def ended(self, sample_id: str, *, group_id: str) -> list[str]:
        """Gives a place back, or stops waiting for one; a sample without is left alone.

        Returns:
            Samples that may start now.
        """
        query = self._query_of.pop(sample_id, None)
        if query is None:
            return []
        query.waiting.pop(sample_id, None)
        query.running.discard(sample_id)
        if not query.running and not query.waiting:
            del self._queries[group_id]
        return self._fill()

    def _fill(self) -> list[str]:
        if self._max_queries is None and self._max_samples is None:
            return []
        admitted: list[str] = []
        left = sum(bool(query.running) for query in self._queries.values())
        for query in sorted(self._queries.values(), key=lambda query: query.order):
            if not query.running:
                if self._max_queries is not None and left >= self._max_queries:
                    continue
                left += 1
            while query.waiting and len(query.running) < (self._max_samples or len(self._query_of)):
                sample_id = next(iter(query.waiting))
                del query.waiting[sample_id]
                query.running.add(sample_id)
                admitted.append(sample_id)
        return admitted
