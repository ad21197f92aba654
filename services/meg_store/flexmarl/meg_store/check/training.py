"""Training's record: micro-batches, marks, ledgers, manifests, and the counts they state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.meg_store.v1alpha1 import graph_pb2
from flexmarl.core import store_keys as keys
from flexmarl.core.ids import parse_batch
from flexmarl.meg_store.backend import Backend, Table
from flexmarl.meg_store.check.report import CheckReport
from flexmarl.meg_store.check.rows import RowFacts


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """What is stored of one run's training.

    Attributes:
        micro_batches: Records by id.
        states: State records.
        manifests: Manifests, oldest first.
    """

    micro_batches: Mapping[str, graph_pb2.MicroBatch]
    states: list[graph_pb2.StateRecord]
    manifests: list[graph_pb2.Manifest]

    @classmethod
    def read(cls, backend: Backend, run_id: str) -> TrainingRecord:
        """Read it all."""

        def values(kind: str) -> list[bytes]:
            prefix = keys.prefix(kind, run_id)
            return [value for _, value in backend.scan(Table.META, prefix, keys.after(prefix))]

        records = [graph_pb2.MicroBatch.FromString(value) for value in values("micro_batch")]
        return cls(
            {record.micro_batch_id: record for record in records},
            [graph_pb2.StateRecord.FromString(value) for value in values("state")],
            [graph_pb2.Manifest.FromString(value) for value in values("manifest")],
        )

    def consumed(self) -> dict[tuple[int, int], frozenset[str]]:
        """Consumed micro-batches of each committed batch attempt."""
        batches = [manifest.batch for manifest in self.manifests if manifest.HasField("batch")]
        return {(b.batch, b.batch_attempt): frozenset(b.consumed_micro_batch_ids) for b in batches}


class TrainingCheck:
    """Checks one run's training record.

    Args:
        backend: The data.
        run: The run.
        record: What is stored of its training.
        facts: Of its rows.
        report: Where findings go.
    """

    def __init__(
        self,
        backend: Backend,
        run: graph_pb2.Run,
        record: TrainingRecord,
        facts: RowFacts,
        report: CheckReport,
        *,
        shard: str,
    ) -> None:
        self._backend = backend
        self._run = run
        self._run_id = run.run_id
        self._record = record
        self._facts = facts
        self._report = report
        self._shard = shard

    def check(self) -> None:
        """Check everything."""
        self._check_records()
        self._check_marks()
        self._check_ledgers()
        self._check_manifests()
        if len(self._run.shards) <= 1:  # other shards have the rest of the counts
            self._check_counts()

    def _check_records(self) -> None:
        owners: dict[str, str] = {}
        for name, record in self._record.micro_batches.items():
            self._report.checked["micro_batches"] += 1
            where = f"{self._run_id} micro-batch {name}"
            for ref in record.rows:
                first = owners.setdefault(ref.vertex_id, name)
                self._report.expect(
                    first == name, "record", where, f"row {ref.vertex_id} is also in {first}"
                )
                self._check_owned(ref, record, where)

    def _check_owned(
        self, ref: common_pb2.VertexRef, record: graph_pb2.MicroBatch, where: str
    ) -> None:
        name = record.micro_batch_id
        owner = self._backend.get(Table.MARKS, keys.join("owner", self._run_id, ref.vertex_id))
        self._report.expect(
            owner == name.encode(),
            "mark",
            where,
            f"row {ref.vertex_id} belongs to {owner.decode() if owner else 'nobody'}",
        )
        if ref.shard not in ("", self._shard):
            return
        row = self._backend.get(Table.ROWS, keys.row(self._run_id, ref.agent, ref.vertex_id))
        if row is None:
            self._report.add("reference", where, f"row {ref.vertex_id} is missing")
            return
        try:
            meta = graph_pb2.VertexMeta.FromString(row)
        except DecodeError:
            return  # reported with the rows
        self._report.expect(
            meta.policy == record.policy and meta.HasField("advantage"),
            "record",
            where,
            f"row {ref.vertex_id} is of policy {meta.policy}, or was never released",
        )
        self._report.expect(
            meta.micro_batch_id in ("", name),
            "mark",
            where,
            f"row {ref.vertex_id} is marked by {meta.micro_batch_id}",
        )

    def _check_marks(self) -> None:
        is_home = not self._run.shards or self._run.shards[0].name == self._shard
        for vertex_id, name in self._facts.marked.items():
            self._report.checked["marks"] += 1
            record = self._record.micro_batches.get(name)
            if record is None:
                self._report.expect(
                    not is_home, "mark", f"{self._run_id} vertex {vertex_id}", f"{name} is missing"
                )

    def _check_ledgers(self) -> None:
        for state in self._record.states:
            self._report.checked["states"] += 1
            where = f"{self._run_id} state {state.policy} v{state.version}"
            self._check_named([state.weights, state.master, state.moments, state.gradients], where)
            ids = [*state.ledger, *state.dropped]
            self._report.expect(
                len(set(ids)) == len(ids), "ledger", where, "a micro-batch is in it twice"
            )
            batch = state.version - 1 if state.applied else state.version
            for name in ids:
                record = self._record.micro_batches.get(name)
                if record is None:
                    self._report.add("ledger", where, f"micro-batch {name} has no record")
                elif (record.policy, record.batch) != (state.policy, batch):
                    self._report.add(
                        "ledger",
                        where,
                        f"micro-batch {name} is of policy {record.policy}, batch {record.batch}",
                    )

    def _check_manifests(self) -> None:
        used: dict[str, int] = {}
        for expected, manifest in enumerate(self._record.manifests):
            self._report.checked["manifests"] += 1
            where = f"{self._run_id} version {manifest.version}"
            self._report.expect(
                manifest.version == expected, "manifest", where, f"version {expected} is missing"
            )
            for name in manifest.batch.consumed_micro_batch_ids:
                first = used.setdefault(name, manifest.version)
                self._report.expect(
                    first == manifest.version,
                    "ledger",
                    where,
                    f"micro-batch {name} was consumed by version {first} already",
                )
                self._report.expect(
                    name in self._record.micro_batches
                    and parse_batch(name).batch == manifest.batch.batch,
                    "ledger",
                    where,
                    f"micro-batch {name} has no record, or is of another batch",
                )
        if self._record.manifests:
            newest = self._record.manifests[-1]
            where = f"{self._run_id} version {newest.version}"
            for policy in newest.policies.values():
                self._check_named([policy.weights, policy.master, policy.moments], where)

    def _check_named(self, refs: list[common_pb2.ObjectRef], where: str) -> None:
        for ref in refs:
            if ref.key and ref.shard in ("", self._shard):
                stored = self._backend.get(Table.META, keys.join("segment", ref.key))
                self._report.expect(
                    stored is not None, "reference", where, f"segment {ref.key} is missing"
                )

    def _check_counts(self) -> None:
        for manifest in self._record.manifests:
            if not manifest.HasField("batch"):
                continue
            batch = manifest.batch
            account = self._facts.accounts.get((batch.batch, batch.batch_attempt))
            for policy, stated in batch.policies.items():
                where = f"{self._run_id} batch {batch.batch} policy {policy or '(none)'}"
                found = None if account is None else account.policies.get(policy)
                counted = (
                    (0, 0, 0)
                    if found is None
                    else (found.finished, found.consumed, sum(found.voided.values()))
                )
                said = (stated.finished, stated.consumed, sum(stated.voided.values()))
                self._report.expect(
                    counted == said,
                    "count",
                    where,
                    "finished, consumed, void are {}, {}, {}".format(*counted)
                    + "; the manifest says {}, {}, {}".format(*said),
                )
                self._report.expect(
                    found is None or found.balances(),
                    "count",
                    where,
                    "finished is not consumed + void",
                )
