"""The backend's twin in memory: same contract, no files; for unit tests."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from pathlib import Path

from flexmarl.core.errors import not_built
from flexmarl.meg_store.backend import TABLES, Batch, Table


class MemoryBackend:
    """Sorted keys and a dict per table."""

    def __init__(self) -> None:
        self._values: list[dict[bytes, bytes]] = [{} for _ in TABLES]
        self._keys: list[list[bytes]] = [[] for _ in TABLES]

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The value, or None."""
        return self._values[table].get(key)

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values, in order."""
        return [self._values[table].get(key) for key in keys]

    def scan(
        self, table: Table, start: bytes, end: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with start <= key < end, as of now."""
        keys = self._keys[table]
        first = bisect_left(keys, start)
        last = len(keys) if end is None else bisect_left(keys, end)
        pairs = [(key, self._values[table][key]) for key in keys[first:last]]
        return iter(reversed(pairs) if reverse else pairs)

    def write(self, batches: Sequence[Batch]) -> None:
        """Apply batches in order."""
        for batch in batches:
            for table in TABLES:
                for key, value in batch.writes[table].items():
                    self._set(table, key, value)
            for table, start, end in batch.deleted_ranges:
                for key, _ in list(self.scan(table, start, end)):
                    self._set(table, key, None)

    def flush(self) -> None:
        """Nothing outlives the process anyway."""

    def checkpoint(self, path: Path) -> None:
        """Refused: there are no files.

        Raises:
            DomainError: NOT_BUILT.
        """
        raise not_built(f"a snapshot of a store in memory ({path})")

    def compact(self, table: Table, start: bytes | None, end: bytes | None) -> None:
        """Deleted keys take no space anyway."""

    def close(self) -> None:
        """Nothing to release."""

    def _set(self, table: Table, key: bytes, value: bytes | None) -> None:
        values, keys = self._values[table], self._keys[table]
        if value is not None:
            if key not in values:
                insort(keys, key)
            values[key] = value
        elif values.pop(key, None) is not None:
            del keys[bisect_left(keys, key)]
