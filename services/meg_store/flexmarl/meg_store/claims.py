"""Claimable rows per policy, the oldest group's first, with a window on the front of the list.

The list is a table (released, complete rows that are neither void nor marked). Rows leave it from
the front, so a scan from its start would step over the tombstones of everything consumed so far:
the front is therefore kept in memory, and the table is read only onwards from the window's end.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import store_keys as keys
from flexmarl.meg_store.backend import Batch, Table
from flexmarl.meg_store.database import Database

_CLAIM = keys.prefix("claim")
_MIN_FILL = 1024
_MAX_WINDOW = 8192
_TOKENS = struct.Struct(">Q")


@dataclass(slots=True)
class _Window:
    """The front of one policy's list: every claimable row before `end`, and none from there on."""

    end: bytes
    rows: dict[bytes, bytes] = field(default_factory=dict)
    is_sorted: bool = True

    def add(self, key: bytes, value: bytes) -> None:
        if key >= self.end:
            return  # the table has it
        if self.rows and key < next(reversed(self.rows)):
            self.is_sorted = False
        self.rows[key] = value
        if len(self.rows) > _MAX_WINDOW:
            self.sort()
            kept = dict(list(self.rows.items())[: _MAX_WINDOW // 2])
            self.end = next(reversed(kept)) + b"\0"
            self.rows = kept

    def sort(self) -> None:
        if not self.is_sorted:
            self.rows = dict(sorted(self.rows.items()))
            self.is_sorted = True


class Claims:
    """Claimable rows of all runs, as acknowledged writes left them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._windows: dict[bytes, _Window] = {}

    def oldest(
        self, run_id: str, policy: str, *, max_rows: int, max_tokens: int
    ) -> tuple[list[bytes], bool]:
        """Serialised `ClaimableRow`s of a policy by vertex id, and whether there are more.

        Args:
            run_id: Run.
            policy: Policy.
            max_rows: At most this many.
            max_tokens: At most this many tokens, but one row at least; 0 means any number.
        """
        prefix = keys.prefix("claim", run_id, policy)
        window = self._windows.get(prefix) or _Window(prefix)
        self._fill(window, prefix, at_least=max_rows + 1)
        if window.rows:
            self._windows[prefix] = window  # not for a name that no policy has
        rows: list[bytes] = []
        num_tokens = 0
        for value in window.rows.values():
            if max_tokens:
                num_tokens += _TOKENS.unpack_from(value)[0]
            if len(rows) == max_rows or (rows and num_tokens > max_tokens > 0):
                return rows, True
            rows.append(value[_TOKENS.size :])
        return rows, False

    def applied(self, batch: Batch) -> None:
        """Follow an acknowledged write."""
        for key, value in batch.writes[Table.MARKS].items():
            if not key.startswith(_CLAIM):
                continue
            window = self._windows.get(key[: key.rindex(b"\0") + 1])
            if window is None:
                continue  # never asked for: the table has it
            if value is None:
                window.rows.pop(key, None)
            else:
                window.add(key, value)

    def forget(self, run_id: str) -> None:
        """Drop the windows of a run that is deleted."""
        prefix = keys.prefix("claim", run_id)
        for key in [key for key in self._windows if key.startswith(prefix)]:
            del self._windows[key]

    def _fill(self, window: _Window, prefix: bytes, *, at_least: int) -> None:
        window.sort()
        missing = at_least - len(window.rows)
        last = keys.after(prefix)
        if missing <= 0 or window.end == last:
            return
        wanted = max(missing, _MIN_FILL)
        pairs = self._database.backend.scan(Table.MARKS, window.end, last)
        for (key, value), _ in zip(pairs, range(wanted), strict=False):
            window.rows[key] = value
            window.end = key + b"\0"
            wanted -= 1
        if wanted:
            window.end = last


def claim_key(run_id: str, policy: str, vertex_id: str) -> bytes:
    """Key of a claimable row."""
    return keys.join("claim", run_id, policy, vertex_id)


def claim_value(meta: graph_pb2.VertexMeta, *, shard: str) -> bytes:
    """What a listing tells of a claimable row: its tokens, then the message as it is sent."""
    num_tokens = meta.num_prompt_tokens + meta.num_response_tokens
    row = common_pb2.VertexRef(shard=shard, vertex_id=meta.vertex_id, agent=meta.agent)
    message = pb.ClaimableRow(row=row, num_tokens=num_tokens)
    return _TOKENS.pack(num_tokens) + message.SerializeToString(deterministic=True)


def is_claimable(meta: graph_pb2.VertexMeta, required: Sequence[str]) -> bool:
    """Whether a row is released, complete, not void and not marked.

    Args:
        meta: Its meta columns.
        required: Declared columns that it must have.
    """
    return (
        not meta.micro_batch_id
        and not meta.void_reason
        and meta.HasField("advantage")
        and is_complete(meta, required)
    )


def is_complete(meta: graph_pb2.VertexMeta, required: Sequence[str]) -> bool:
    """Whether a row has the declared columns that it must have."""
    return not required or set(required) <= set(meta.ready_columns)
