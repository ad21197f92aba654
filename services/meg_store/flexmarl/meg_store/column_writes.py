"""WriteColumns: values of declared columns that come after the vertex, each written once."""

from __future__ import annotations

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import fencing, row_limits
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store import vertex_checks as checks
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.claims import Claims
from flexmarl.meg_store.columns import check_values
from flexmarl.meg_store.database import Draft
from flexmarl.meg_store.objects import Objects
from flexmarl.meg_store.rows import Rows
from flexmarl.meg_store.runs import RunEntry, Runs


class ColumnWrites:
    """Gives stored rows values; a released row whose last required column comes is claimable."""

    def __init__(self, runs: Runs, claims: Claims, objects: Objects, *, shard: str) -> None:
        self._runs = runs
        self._claims = claims
        self._objects = objects
        self._shard = shard

    def write(self, draft: Draft, request: pb.WriteColumnsRequest) -> pb.WriteColumnsResponse:
        """Write values; those that are there already change nothing.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE, VERTEX_NOT_FOUND, OBJECT_NOT_FOUND,
                CONTENT_MISMATCH for a column with another value, MESSAGE_TOO_LARGE.
            ValueError: A column is not declared, or its value is of another type.
        """
        entry = self._runs.require(request.run_id)
        self._runs.check_term(draft, entry, fencing.ORCHESTRATOR_SCOPE, request.term)
        rows = Rows(draft, entry, self._claims, shard=self._shard)
        for write in request.writes:
            self._write_row(draft, rows, entry, write)
        return pb.WriteColumnsResponse()

    def _write_row(self, draft: Draft, rows: Rows, entry: RunEntry, write: pb.ColumnWrite) -> None:
        meta = rows.load(write.row)
        key = rows.key(write.row)
        payload = graph_pb2.VertexPayload.FromString(draft.get(Table.PAYLOADS, key) or b"")
        new = {
            name: value
            for name, value in write.values.items()
            if not _is_there(meta.vertex_id, payload, name, value)
        }
        # Checked whole, so that a malformed repetition is refused, too; referred to once.
        check_values(meta.vertex_id, write.values, entry.columns)
        for object_key in check_values(meta.vertex_id, new, entry.columns):
            self._objects.refer(draft, object_key)
        if not new:
            return
        for name, value in new.items():
            payload.columns[name].CopyFrom(value)
        meta.ready_columns.extend(sorted(new))
        data = payload.SerializeToString(deterministic=True)
        checks.check_size(meta.vertex_id, len(data), row_limits.MAX_PAYLOAD_BYTES)
        draft.put(Table.PAYLOADS, key, data)
        rows.store(meta)


def _is_there(
    vertex_id: str, payload: graph_pb2.VertexPayload, name: str, value: graph_pb2.ColumnValue
) -> bool:
    if name not in payload.columns:
        return False
    # As bytes: a NaN equals itself.
    if payload.columns[name].SerializeToString() != value.SerializeToString():
        raise DomainError(
            ErrorReason.CONTENT_MISMATCH,
            f"vertex {vertex_id!r}: column {name!r} has another value already",
            {"vertex": vertex_id, "column": name},
        )
    return True
