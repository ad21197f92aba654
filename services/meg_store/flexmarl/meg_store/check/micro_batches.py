"""Micro-batch records against the rows that they name, on whatever shard these are.

    record -> row     the row is there, released, of the record's policy, and nobody else's
    owner  -> record  what keeps a row out of other records is a record that names it
    mark   -> record  a marked row is named by the record that its mark says

Records and owners are on the home shard alone; rows and marks are where the group lies.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import DecodeError

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.core import store_keys as keys
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.check.opened import OpenStore
from flexmarl.meg_store.check.record import TrainingRecord
from flexmarl.meg_store.check.rows import RowFacts
from flexmarl.meg_store.check.spread import SpreadRun, newest_term


class MicroBatchCheck:
    """Checks the micro-batches of one run.

    Args:
        run: The run; its home shard is read.
        record: What is stored of its training.
        facts: Of its rows, by shard.
    """

    def __init__(
        self, run: SpreadRun, record: TrainingRecord, facts: Mapping[str, RowFacts]
    ) -> None:
        assert run.home is not None
        self._run = run
        self._run_id = run.run_id
        self._home = run.home
        self._report = run.home.report
        self._record = record
        self._facts = facts
        self._named: dict[str, str] = {}
        """The record that names each row; the first one, where two do."""

    def check(self) -> None:
        """Check everything."""
        newest = newest_term(self._home, self._run_id)
        for name, record in self._record.micro_batches.items():
            self._report.checked["micro_batches"] += 1
            where = f"{self._run_id} micro-batch {name}"
            self._report.expect(
                record.term <= newest,
                "term",
                where,
                f"was written under term {record.term}, the newest that was issued is {newest}",
            )
            for ref in record.rows:
                first = self._named.setdefault(ref.vertex_id, name)
                self._report.expect(
                    first == name, "record", where, f"row {ref.vertex_id} is also in {first}"
                )
                self._check_owned(ref, name, where)
                self._check_row(ref, record, where)
        self._check_owners()
        self._check_marks()

    def _check_owned(self, ref: common_pb2.VertexRef, name: str, where: str) -> None:
        key = keys.join("owner", self._run_id, ref.vertex_id)
        owner = self._home.backend.get(Table.MARKS, key)
        self._report.expect(
            owner == name.encode(),
            "mark",
            where,
            f"row {ref.vertex_id} belongs to {owner.decode() if owner else 'nobody'}",
        )

    def _check_row(
        self, ref: common_pb2.VertexRef, record: graph_pb2.MicroBatch, where: str
    ) -> None:
        store = self._store_of(ref)
        if store is None:
            return
        value = store.backend.get(Table.ROWS, keys.row(self._run_id, ref.agent, ref.vertex_id))
        if value is None:
            self._report.add(
                "reference", where, f"row {ref.vertex_id} is missing on {store.shard!r}"
            )
            return
        try:
            meta = graph_pb2.VertexMeta.FromString(value)
        except DecodeError:
            return  # reported with the rows
        self._report.expect(
            meta.policy == record.policy and meta.HasField("advantage"),
            "record",
            where,
            f"row {ref.vertex_id} is of policy {meta.policy}, or was never released",
        )
        self._report.expect(
            meta.micro_batch_id in ("", record.micro_batch_id),
            "mark",
            where,
            f"row {ref.vertex_id} is marked by {meta.micro_batch_id}",
        )

    def _store_of(self, ref: common_pb2.VertexRef) -> OpenStore | None:
        """The store of a row; None where it is lost, not read, or not readable."""
        if ref.shard and ref.shard not in self._run.names:
            self._report.add(
                "reference",
                f"{self._run_id} vertex {ref.vertex_id}",
                f"a record names it on {ref.shard!r}, which is no shard of the run",
            )
            return None
        store = self._run.stores.get(ref.shard or self._home.shard)
        return store if store is not None and store.has_rows else None

    def _check_owners(self) -> None:
        for key, value in self._home.scan(Table.MARKS, "owner", self._run_id):
            vertex_id, name = key.decode().rpartition("\0")[2], value.decode()
            self._report.expect(
                self._named.get(vertex_id) == name,
                "mark",
                f"{self._run_id} vertex {vertex_id}",
                f"belongs to {name}, and no such record names it: nobody will train on it",
            )

    def _check_marks(self) -> None:
        for shard, store in self._run.stores.items():
            marked = self._facts[shard].marked if shard in self._facts else {}
            for vertex_id, name in marked.items():
                store.report.checked["marks"] += 1
                what = (
                    f"is marked by {name}, which does not name it"
                    if name in self._record.micro_batches
                    else f"is marked by {name}, of which there is no record"
                )
                store.report.expect(
                    self._named.get(vertex_id) == name,
                    "mark",
                    f"{self._run_id} vertex {vertex_id}",
                    what,
                )
