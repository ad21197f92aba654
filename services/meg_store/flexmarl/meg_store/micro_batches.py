"""Micro-batch records and marks: which rows go to a trainer together, exactly once.

The record, on the home shard, is what owns its rows: it is refused if any row has another owner.
Rows of the home shard are marked in the same write. Marks on other shards follow it, are driven
again after a crash, and are hints: the ledger decides.
"""

from __future__ import annotations

import re

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import fencing, graph_rules
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import check_name, parse_batch
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.claims import Claims
from flexmarl.meg_store.database import Database, Draft
from flexmarl.meg_store.rows import Rows
from flexmarl.meg_store.runs import Runs

MAX_ROWS = 65536
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_NOT_VOID = common_pb2.VOID_REASON_UNSPECIFIED


class MicroBatches:
    """Records of the runs whose home is here, and marks on the rows that live here."""

    def __init__(self, database: Database, runs: Runs, claims: Claims, *, shard: str) -> None:
        self._database = database
        self._runs = runs
        self._claims = claims
        self._shard = shard

    def create(
        self, draft: Draft, request: pb.CreateMicroBatchRequest
    ) -> pb.CreateMicroBatchResponse:
        """Write a record and give it its rows, those here marked; the same again is answered.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE, ROW_ALREADY_MARKED, CONTENT_MISMATCH,
                VERTEX_NOT_FOUND, STATE_TRANSITION_REFUSED for a row that is not released.
            ValueError: The record is malformed.
        """
        record = request.micro_batch
        entry = self._runs.require(request.run_id)
        self._runs.require_home(entry)
        self._runs.check_term(draft, entry, fencing.ORCHESTRATOR_SCOPE, record.term)
        _check_record(record)
        key = record_key(request.run_id, record.batch, record.micro_batch_id)
        value = record.SerializeToString(deterministic=True)
        known = draft.get(Table.META, key)
        if known is not None:
            _check_same(known, record)
            return pb.CreateMicroBatchResponse()
        rows = Rows(draft, entry, self._claims, shard=self._shard)
        rows.prefetch(record.rows, owners=True)
        for ref in record.rows:
            self._claim(rows, ref, record)
        draft.put(Table.META, key, value)
        draft.event(request.run_id, pb.Event(kind=pb.EVENT_KIND_MICRO_BATCH, micro_batch=record))
        return pb.CreateMicroBatchResponse()

    def mark(self, draft: Draft, request: pb.MarkRowsRequest) -> pb.MarkRowsResponse:
        """Mark rows of a record; marking them again for the same one changes nothing.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE, VERTEX_NOT_FOUND, ROW_ALREADY_MARKED,
                STATE_TRANSITION_REFUSED for a row that was not released.
        """
        entry = self._runs.require(request.run_id)
        self._runs.check_term(draft, entry, fencing.ORCHESTRATOR_SCOPE, request.term)
        micro_batch_id = _check_id(request.micro_batch_id)
        rows = Rows(draft, entry, self._claims, shard=self._shard)
        rows.prefetch(request.rows, owners=True)
        for ref in request.rows:
            meta = rows.load(ref)
            vertex_id, owner = meta.vertex_id, meta.micro_batch_id
            if owner:
                graph_rules.check_owner(vertex_id, owner=owner, micro_batch_id=micro_batch_id)
                continue
            # A row that became void after the record was written is marked all the same.
            graph_rules.check_claim(
                vertex_id,
                released=meta.HasField("advantage") and rows.is_complete(meta),
                is_void=False,
                owner=rows.owner(vertex_id),
                micro_batch_id=micro_batch_id,
            )
            meta.micro_batch_id = micro_batch_id
            rows.store(meta)
        return pb.MarkRowsResponse()

    def _claim(self, rows: Rows, ref: common_pb2.VertexRef, record: graph_pb2.MicroBatch) -> None:
        owner = rows.owner(ref.vertex_id)
        if not rows.is_here(ref):
            # Its shard checks the rest when the row is marked there.
            graph_rules.check_owner(
                ref.vertex_id, owner=owner, micro_batch_id=record.micro_batch_id
            )
        else:
            meta = rows.load(ref)
            if meta.policy != record.policy or meta.batch != record.batch:
                raise ValueError(
                    f"row {ref.vertex_id!r} is of policy {meta.policy!r}, batch {meta.batch}; "
                    f"micro-batch {record.micro_batch_id!r} is not"
                )
            graph_rules.check_claim(
                ref.vertex_id,
                released=meta.HasField("advantage") and rows.is_complete(meta),
                is_void=meta.void_reason != _NOT_VOID,
                owner=owner or meta.micro_batch_id or None,
                micro_batch_id=record.micro_batch_id,
            )
            meta.micro_batch_id = record.micro_batch_id
            rows.store(meta)
        rows.own(ref.vertex_id, record.micro_batch_id)


def record_key(run_id: str, batch: int, micro_batch_id: str) -> bytes:
    """Key of a record; those of a batch sort by id, and so in order of creation."""
    return keys.numbered(batch, "micro_batch", run_id) + micro_batch_id.encode()


def _check_id(micro_batch_id: str) -> str:
    parse_batch(micro_batch_id)
    if not _ID.fullmatch(micro_batch_id):
        raise ValueError(f"not a micro-batch id: {micro_batch_id!r}")
    return micro_batch_id


def _check_record(record: graph_pb2.MicroBatch) -> None:
    _check_id(record.micro_batch_id)
    check_name(record.policy, what="policy")
    batch = parse_batch(record.micro_batch_id)
    if (batch.batch, batch.attempt) != (record.batch, record.batch_attempt):
        raise ValueError(f"micro-batch {record.micro_batch_id!r} is of another batch than it says")
    if not 0 < len(record.rows) <= MAX_ROWS:
        raise ValueError(f"micro-batch {record.micro_batch_id!r}: give 1 to {MAX_ROWS} rows")
    if len({ref.vertex_id for ref in record.rows}) < len(record.rows):
        raise ValueError(f"micro-batch {record.micro_batch_id!r} names a row twice")


def _check_same(known: bytes, record: graph_pb2.MicroBatch) -> None:
    stored = graph_pb2.MicroBatch.FromString(known)
    if (stored.policy, list(stored.rows)) != (record.policy, list(record.rows)):
        raise DomainError(
            ErrorReason.CONTENT_MISMATCH,
            f"micro-batch {record.micro_batch_id!r} exists with other rows",
            {"micro_batch": record.micro_batch_id},
        )
