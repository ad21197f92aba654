"""Rows: what they say of themselves, edges, groups, payloads, objects, claims, and their counts."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.client.enums import VERTEX_STATUS, VOID_REASON
from flexmarl.core import graph_rules
from flexmarl.core import store_keys as keys
from flexmarl.core.batch_account import BatchAccount
from flexmarl.core.errors import DomainError
from flexmarl.core.ids import is_evaluation
from flexmarl.meg_store import vertex_checks
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.check.opened import OpenStore
from flexmarl.meg_store.claims import claim_key, claim_value, is_claimable

_LATER = ("reward", "advantage", "void_reason", "micro_batch_id", "merged_into")
"""What the rows get after they were written."""


@dataclass(slots=True)
class RowFacts:
    """What the other checks need of one run's rows.

    Attributes:
        groups: Shard that each group was lost with, by group id; empty for those that are here.
        marked: Micro-batch of each marked row, by vertex id.
        objects: How many rows refer to each object, by key.
        accounts: Account of each batch attempt, by (batch, attempt).
    """

    groups: dict[str, str] = field(default_factory=dict)
    marked: dict[str, str] = field(default_factory=dict)
    objects: Counter[str] = field(default_factory=Counter)
    accounts: dict[tuple[int, int], BatchAccount] = field(default_factory=dict)


class RowCheck:
    """Checks one run's rows on one shard, sample by sample.

    Args:
        store: The shard.
        run: The run, as this shard has it.
        consumed: Consumed micro-batches of each committed batch attempt.
    """

    def __init__(
        self,
        store: OpenStore,
        run: graph_pb2.Run,
        *,
        consumed: Mapping[tuple[int, int], frozenset[str]],
    ) -> None:
        self._store = store
        self._backend = store.backend
        self._shard = store.shard
        self._report = store.report
        self._run_id = run.run_id
        self._columns = {column.name: int(column.type) for column in run.columns}
        self._required = [column.name for column in run.columns if column.required]
        self._consumed = consumed
        self._num_claimable = 0
        self.facts = RowFacts()

    def run(self) -> RowFacts:
        """Check everything."""
        self._read_groups()
        agents = list(self._agents())
        # Each agent's table is sorted by vertex id: merged, a sample's vertices come together, and
        # no more than one sample is held in memory.
        merged = heapq.merge(*map(self._rows_of, agents), key=lambda pair: pair[0])
        for _, pairs in itertools.groupby(merged, key=lambda pair: pair[0].partition("/")[0]):
            self._check_sample(pairs)
        self._check_agents(agents)
        self._check_payloads()
        self._check_claims()
        return self.facts

    def _agents(self) -> Iterator[str]:
        """Agents that have rows, whether they are listed or not."""
        start = keys.prefix(self._run_id)
        end = keys.after(start)
        while (first := next(self._backend.scan(Table.ROWS, start, end), None)) is not None:
            agent = first[0].decode().split("\0")[1]
            yield agent
            start = keys.after(keys.prefix(self._run_id, agent))

    def _rows_of(self, agent: str) -> Iterator[tuple[str, graph_pb2.VertexMeta]]:
        """The readable rows of an agent's table, by vertex id."""
        for key, value in self._store.scan(Table.ROWS, self._run_id, agent):
            self._report.checked["rows"] += 1
            meta = self._row(key, value)
            if meta is not None:
                yield key.decode().rpartition("\0")[2], meta

    def _check_sample(self, pairs: Iterable[tuple[str, graph_pb2.VertexMeta]]) -> None:
        edges: dict[str, list[str]] = {}
        for vertex_id, meta in pairs:
            self._report.expect(
                vertex_id not in edges,
                "row",
                f"{self._run_id} vertex {vertex_id}",
                "is in the tables of two agents",
            )
            edges[vertex_id] = list(meta.upstream_vertex_ids)
        self._check_edges(edges)

    def _row(self, key: bytes, value: bytes) -> graph_pb2.VertexMeta | None:
        _, agent, vertex_id = key.decode().split("\0")
        where = f"{self._run_id} vertex {vertex_id}"
        try:
            meta = graph_pb2.VertexMeta.FromString(value)
            written = graph_pb2.VertexMeta.FromString(value)
            for name in _LATER:
                written.ClearField(name)  # type: ignore[arg-type] # names of its fields
            self._check_written(key, written, where)
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
            meta.group_id in self.facts.groups,
            "reference",
            where,
            f"group {meta.group_id} is missing",
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

    def _check_written(self, key: bytes, meta: graph_pb2.VertexMeta, where: str) -> None:
        """Check what a row was written as."""
        value = self._backend.get(Table.PAYLOADS, key)
        if value is None:
            self._report.add("row", where, "has no payload")
            meta.ClearField("ready_columns")  # that is told already
        payload = graph_pb2.VertexPayload.FromString(value) if value else None
        checked = vertex_checks.check_vertices([meta], [payload], alike={}, declared=self._columns)
        objects = checked.objects.get(0, ())
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

    def _check_agents(self, agents: Iterable[str]) -> None:
        listed = {
            key.decode().rpartition("\0")[2]
            for key, _ in self._store.scan(Table.META, "agent", self._run_id)
        }
        for agent in agents:
            self._report.expect(
                agent in listed,
                "reference",
                f"{self._run_id} agent {agent}",
                "is not listed: its rows are in no listing and no count",
            )

    def _check_payloads(self) -> None:
        for key, _ in self._store.scan(Table.PAYLOADS, self._run_id):
            if self._backend.get(Table.ROWS, key) is None:
                vertex_id = key.decode().rpartition("\0")[2]
                self._report.add("row", f"{self._run_id} vertex {vertex_id}", "payload without row")

    def _check_claims(self) -> None:
        listed = sum(1 for _ in self._store.scan(Table.MARKS, "claim", self._run_id))
        self._report.expect(
            listed == self._num_claimable,
            "claim",
            self._run_id,
            f"{listed} rows are listed as claimable, {self._num_claimable} are",
        )

    def _read_groups(self) -> None:
        for name, value in self._named("group"):
            where = f"{self._run_id} group {name}"
            group = self._report.read("row", where, graph_pb2.Group.FromString, value)
            if group is not None:
                said = f"says that it is {group.group_id}"
                self._report.expect(group.group_id == name, "row", where, said)
                self.facts.groups[name] = group.lost_shard
        for name, value in self._named("sample"):
            where = f"{self._run_id} sample {name}"
            sample = self._report.read("row", where, graph_pb2.Sample.FromString, value)
            if sample is not None:
                said = f"says that it is {sample.sample_id}"
                self._report.expect(sample.sample_id == name, "row", where, said)
                is_there = sample.group_id in self.facts.groups
                missing = f"group {sample.group_id} is missing"
                self._report.expect(is_there, "reference", where, missing)

    def _named(self, kind: str) -> Iterator[tuple[str, bytes]]:
        for key, value in self._store.scan(Table.GRAPH, kind, self._run_id):
            self._report.checked[f"{kind}s"] += 1
            yield key.decode().rpartition("\0")[2], value


def _text(error: Exception) -> str:
    return error.message if isinstance(error, DomainError) else str(error)
