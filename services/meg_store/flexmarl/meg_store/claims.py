"""The list of claimable rows, with a cursor that skips what was consumed.

Marking deletes from the front of the list and leaves tombstones there; a seek from the start would
step over all of them each time. The cursor is the place before which nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterator

from flexmarl.core import store_keys as keys
from flexmarl.meg_store.backend import Batch, Table
from flexmarl.meg_store.database import Database


class Claims:
    """Claimable rows per run and agent."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cursors: dict[bytes, bytes] = {}

    def scan(self, run_id: str, agent: str, start: bytes | None = None) -> Iterator[bytes]:
        """Row keys of claimable rows of an agent from a row key on, in order."""
        prefix = keys.prefix("claim", run_id, agent)
        cursor = self._cursors.get(prefix, prefix)
        first = cursor if start is None else max(cursor, b"claim\0" + start)
        is_front = first == cursor
        for key, _ in self._database.backend.scan(Table.MARKS, first, keys.after(prefix)):
            if is_front:
                self._cursors[prefix] = key
                is_front = False
            yield key[len(b"claim\0") :]
        if is_front:
            # Nothing is left: the next release sets the cursor back to where it is.
            self._cursors[prefix] = keys.after(prefix)

    def applied(self, batch: Batch) -> None:
        """Set cursors back before rows that an acknowledged write released."""
        for key, value in batch.writes[Table.MARKS].items():
            if value is None or not key.startswith(b"claim\0"):
                continue
            prefix = key[: key.rindex(b"\0") + 1]
            if key < self._cursors.get(prefix, prefix):
                self._cursors[prefix] = key
