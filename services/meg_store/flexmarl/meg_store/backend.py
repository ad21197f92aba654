"""What the store needs from an ordered key-value engine: RocksDB, or memory in unit tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Protocol


class Table(IntEnum):
    """Tables (column families). A write batch is atomic across all of them."""

    META = 0
    """Small records: runs, terms, manifests, states, micro-batches, objects, segments."""
    ROWS = 1
    """Meta columns of vertices, one key range per run and agent."""
    PAYLOADS = 2
    """Data columns of vertices, under the same keys."""
    GRAPH = 3
    """Groups and samples."""
    MARKS = 4
    """Claimable rows, and which micro-batch owns which row."""
    EVENTS = 5
    """Event log of each run, by cursor."""
    REQUESTS = 6
    """Answered request ids."""
    BLOBS = 7
    """Pieces of objects."""
    LATE = 8
    """Late results: kept for people, never used."""


TABLES = tuple(Table)
SHARD_KEY = b"shard"
"""Key in META of the name of the shard whose data this is."""


@dataclass(slots=True)
class Batch:
    """One atomic write: the last value per key, None to delete, then ranges to delete."""

    writes: list[dict[bytes, bytes | None]] = field(default_factory=lambda: [{} for _ in TABLES])
    deleted_ranges: list[tuple[Table, bytes, bytes]] = field(default_factory=list)
    size_bytes: int = 0

    def put(self, table: Table, key: bytes, value: bytes | None) -> None:
        """Set, or delete with None."""
        self.writes[table][key] = value
        self.size_bytes += len(key) + (len(value) if value is not None else 0)

    def put_many(self, table: Table, values: Mapping[bytes, bytes]) -> None:
        """Set many at once."""
        self.writes[table].update(values)
        self.size_bytes += sum(map(len, values)) + sum(map(len, values.values()))


class Backend(Protocol):
    """An ordered key-value engine. One thread writes; any thread reads."""

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The value, or None."""
        ...

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values, in order."""
        ...

    def scan(
        self, table: Table, start: bytes, end: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with start <= key < end, in key order, or backwards."""
        ...

    def write(self, batches: Sequence[Batch]) -> None:
        """Apply batches atomically and in order; durable against the death of this process."""
        ...

    def flush(self) -> None:
        """Make everything written durable against power loss."""
        ...

    def checkpoint(self, path: Path) -> None:
        """Write a copy of everything applied so far into a new folder, while others read and write.

        Raises:
            DomainError: NOT_BUILT where there are no files.
        """
        ...

    def compact(self, table: Table, start: bytes | None, end: bytes | None) -> None:
        """Give the space of deleted keys in start <= key < end back; None: from or to the edge."""
        ...

    def close(self) -> None:
        """Release files and lock."""
        ...
