"""Rows: what they say of themselves, edges, groups, payloads, objects, claims, and their counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from flexmarl.api.meg_store.v1alpha1 import graph_pb2
from flexmarl.client.enums import VERTEX_STATUS, VOID_REASON
from flexmarl.core import graph_rules
from flexmarl.core import store_keys as keys
from flexmarl.core.batch_account import BatchAccount
from flexmarl.core.errors import DomainError
from flexmarl.core.ids import is_evaluation
from flexmarl.meg_store import vertex_checks
from flexmarl.meg_store.backend import Backend, Table
from flexmarl.meg_store.check.report import CheckReport
from flexmarl.meg_store.claims import claim_key, claim_value, is_claimable

_LATER = ("reward", "advantage", "void_reason", "micro_batch_id")
"""What the rows get after they were written."""


@dataclass(slots=True)
class RowFacts:
    """What the other checks need of one run's rows.

    Attributes:
        marked: Micro-batch of each marked row, by vertex id.
        objects: How many rows refer to each object, by key.
        accounts: Account of each batch attempt, by (batch, attempt).
    """

    marked: dict[str, str] = field(default_factory=dict)
    objects: Counter[str] = field(default_factory=Counter)
    accounts: dict[tuple[int, int], BatchAccount] = field(default_factory=dict)


class RowCheck:
    """Checks one run's rows, agent by agent, then the edges of each sample.

    Args:
        backend: The data.
        run: The run.
        report: Where findings go.
        shard: Name of the shard.
        consumed: Consumed micro-batches of each committed batch attempt.
    """

    def __init__(
        self,
        backend: Backend,
        run: graph_pb2.Run,
        report: CheckReport,
        *,
        shard: str,
        consumed: Mapping[tuple[int, int], frozenset[str]],
    ) -> None:
        self._backend = backend
        self._shard = shard
        self._run_id = run.run_id
        self._columns = {column.name: int(column.type) for column in run.columns}
        self._required = [column.name for column in run.columns if column.required]
        self._report = report
        self._consumed = consumed
        self._groups: set[str] = set()
        self._num_claimable = 0
        self.facts = RowFacts()

    def run(self) -> RowFacts:
        """Check everything."""
        self._read_groups()
        edges: dict[str, dict[str, list[str]]] = defaultdict(dict)
        for key, value in self._scan(Table.ROWS, keys.prefix(self._run_id)):
            self._report.checked["rows"] += 1
            meta = self._row(key, value)
            if meta is not None:
                edges[meta.sample_id][meta.vertex_id] = list(meta.upstream_vertex_ids)
        for sample_edges in edges.values():
            self._check_edges(sample_edges)
        self._check_payloads()
        self._check_claims()
        return self.facts

    def _row(self, key: bytes, value: bytes) -> graph_pb2.VertexMeta | None:
        _, agent, vertex_id = key.decode().split("\0")
        where = f"{self._run_id} vertex {vertex_id}"
        try:
            meta = graph_pb2.VertexMeta.FromString(value)
            written = graph_pb2.VertexMeta.FromString(value)
            for name in _LATER:
                written.ClearField(name)  # type: ignore[arg-type] # names of its fields
            vertex_checks.check_meta(written)
            self._check_payload(key, meta, where)
        except (DecodeError, DomainError, ValueError) as error:
            self._report.add("row", where, _text(error))
            return None
        self._report.expect(
            (meta.agent, meta.vertex_id) == (agent, vertex_id),
            "row",
            where,
            f"lies under the key of agent {agent!r}",
        )
        self._report.expect(
            meta.group_id in self._groups, "reference", where, f"group {meta.group_id} is missing"
        )
        if meta.micro_batch_id:
            self.facts.marked[vertex_id] = meta.micro_batch_id
        self._count(meta)
        if is_claimable(meta, self._required):
            self._num_claimable += 1
            stored = self._backend.get(Table.MARKS, claim_key(self._run_id, meta.policy, vertex_id))
            self._report.expect(
                stored == claim_value(meta, shard=self._shard),
                "claim",
                where,
                "is claimable, but not listed as such",
            )
        return meta

    def _check_payload(self, key: bytes, meta: graph_pb2.VertexMeta, where: str) -> None:
        value = self._backend.get(Table.PAYLOADS, key)
        if value is None:
            self._report.add("row", where, "has no payload")
            return
        vertex = graph_pb2.Vertex(meta=meta)
        if value:
            vertex.payload.ParseFromString(value)
        objects = vertex_checks.check_payload(vertex, self._columns)
        self.facts.objects.update(objects)
        for name in objects:
            found = self._backend.get(Table.META, keys.join("object", name))
            self._report.expect(found is not None, "reference", where, f"object {name} is missing")

    def _count(self, meta: graph_pb2.VertexMeta) -> None:
        if is_evaluation(meta.vertex_id):
            return  # no part of any batch
        batch = (meta.batch, meta.batch_attempt)
        account = self.facts.accounts.get(batch)
        if account is None:
            account = BatchAccount(self._consumed.get(batch, frozenset()))
            self.facts.accounts[batch] = account
        account.add(
            meta.policy,
            status=VERTEX_STATUS.to_core(meta.status),
            trainable=meta.trainable,
            void_reason=VOID_REASON.optional(meta.void_reason),
            micro_batch_id=meta.micro_batch_id,
        )

    def _check_edges(self, edges: dict[str, list[str]]) -> None:
        try:
            graph_rules.check_edges(edges, is_stored=lambda _: False)
        except DomainError as error:
            self._report.add("edge", self._run_id, error.message)
        self._report.checked["edges"] += sum(len(upstream) for upstream in edges.values())

    def _check_payloads(self) -> None:
        for key, _ in self._scan(Table.PAYLOADS, keys.prefix(self._run_id)):
            if self._backend.get(Table.ROWS, key) is None:
                vertex_id = key.decode().rpartition("\0")[2]
                self._report.add("row", f"{self._run_id} vertex {vertex_id}", "payload without row")

    def _check_claims(self) -> None:
        listed = sum(1 for _ in self._scan(Table.MARKS, keys.prefix("claim", self._run_id)))
        self._report.expect(
            listed == self._num_claimable,
            "claim",
            self._run_id,
            f"{listed} rows are listed as claimable, {self._num_claimable} are",
        )

    def _read_groups(self) -> None:
        for kind, message in (("group", graph_pb2.Group), ("sample", graph_pb2.Sample)):
            for key, value in self._scan(Table.GRAPH, keys.prefix(kind, self._run_id)):
                name = key.decode().rpartition("\0")[2]
                where = f"{self._run_id} {kind} {name}"
                self._report.checked[f"{kind}s"] += 1
                try:
                    row = message.FromString(value)
                except DecodeError as error:
                    self._report.add("row", where, _text(error))
                    continue
                stored = row.group_id if kind == "group" else getattr(row, "sample_id")  # noqa: B009
                self._report.expect(stored == name, "row", where, f"says that it is {stored}")
                if kind == "group":
                    self._groups.add(name)
                else:
                    self._report.expect(
                        row.group_id in self._groups,
                        "reference",
                        where,
                        f"group {row.group_id} is missing",
                    )

    def _scan(self, table: Table, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._backend.scan(table, prefix, keys.after(prefix))


def _text(error: Exception) -> str:
    return error.message if isinstance(error, DomainError) else str(error)
