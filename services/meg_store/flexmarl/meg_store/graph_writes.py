"""WriteGraph: groups, samples and ended vertices in one atomic write.

Order within a call: groups are admitted, vertices are written, then samples change state; a vertex
in the same call as the end of its sample is therefore in time. Edges are columns of the downstream
vertex; there is no table of their own. Vertices write no events, unless the run asks for them: the
rows are found by their sample, whose end is an event.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.meg_store.v1alpha1 import graph_pb2
from flexmarl.api.meg_store.v1alpha1 import meg_store_pb2 as pb
from flexmarl.client.enums import SAMPLE_STATUS
from flexmarl.core import fencing, graph_rules
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.graph_rules import WriteOutcome
from flexmarl.core.ids import is_evaluation
from flexmarl.core.states import SAMPLE
from flexmarl.meg_store import vertex_checks as checks
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Draft
from flexmarl.meg_store.objects import Objects
from flexmarl.meg_store.rows import encode_meta
from flexmarl.meg_store.runs import RunEntry, Runs

_OUTCOMES = {
    WriteOutcome.ACCEPTED: pb.WRITE_OUTCOME_ACCEPTED,
    WriteOutcome.UNCHANGED: pb.WRITE_OUTCOME_UNCHANGED,
    WriteOutcome.DUPLICATE: pb.WRITE_OUTCOME_DUPLICATE,
    WriteOutcome.SUBGRAPH_CLOSED: pb.WRITE_OUTCOME_SUBGRAPH_CLOSED,
}
_OPEN = common_pb2.GROUP_STATUS_OPEN
_SAMPLE_OPEN = common_pb2.SAMPLE_STATUS_OPEN
_RECENT_VERTICES = 65536


class RecentVertices:
    """Which vertices were accepted lately: answers most edges without asking the backend."""

    def __init__(self) -> None:
        self._ids: OrderedDict[tuple[str, str], None] = OrderedDict()

    def add(self, run_id: str, vertex_ids: Iterable[str]) -> None:
        """Remember some, forget the oldest."""
        for vertex_id in vertex_ids:
            self._ids[run_id, vertex_id] = None
        while len(self._ids) > _RECENT_VERTICES:
            self._ids.popitem(last=False)

    def forget(self, run_id: str) -> None:
        """Drop those of a run."""
        for key in [key for key in self._ids if key[0] == run_id]:
            del self._ids[key]

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._ids


class GraphWrites:
    """Writes the graph of all runs."""

    def __init__(self, runs: Runs, objects: Objects) -> None:
        self._runs = runs
        self._objects = objects
        self._recent = RecentVertices()
        self.num_late = 0

    def write(self, draft: Draft, request: pb.WriteGraphRequest) -> pb.WriteGraphResponse:
        """Decide over every row of a request.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE, NOT_FOUND for a group that was not admitted,
                INVALID_ARGUMENT, REWARD_INVALID, MESSAGE_TOO_LARGE,
                CONTENT_MISMATCH, OBJECT_NOT_FOUND.
            ValueError: An id or a value is malformed.
        """
        entry = self._runs.require(request.run_id)
        self._runs.check_term(draft, entry, fencing.ORCHESTRATOR_SCOPE, request.term)
        call = _Call(draft, entry, self._runs, self._objects, self._recent)
        for group in request.groups:
            call.admit(group)
        vertices = [_OUTCOMES[call.write_vertex(vertex)] for vertex in request.vertices]
        call.check_edges()
        samples = [_OUTCOMES[call.write_sample(sample)] for sample in request.samples]
        draft.at_commit.append(lambda: self._count_late(call.num_late))
        return pb.WriteGraphResponse(vertex_outcomes=vertices, sample_outcomes=samples)

    def forget(self, run_id: str) -> None:
        """Drop what is remembered of a deleted run."""
        self._recent.forget(run_id)

    def _count_late(self, number: int) -> None:
        self.num_late += number


class _Call:
    """One request; remembers what its rows have in common."""

    def __init__(
        self,
        draft: Draft,
        entry: RunEntry,
        runs: Runs,
        objects: Objects,
        recent: RecentVertices,
    ) -> None:
        self._draft = draft
        self._entry = entry
        self._run_id = entry.run_id
        self._runs = runs
        self._objects = objects
        self._recent = recent
        self._group_open: dict[str, bool] = {}
        self._sample_over: dict[str, bool] = {}
        self._closed: dict[tuple[int, int], Collection[str]] = {}
        self._new_edges: dict[str, list[str]] = {}
        self.num_late = 0

    def admit(self, group: graph_pb2.Group) -> None:
        """Admit a group, or accept the same one again."""
        checks.check_group(group)
        key = keys.join("group", self._run_id, group.group_id)
        known = self._draft.get(Table.GRAPH, key)
        if known is not None:
            stored = graph_pb2.Group.FromString(known)
            if _admission(stored) != _admission(group):
                raise DomainError(
                    ErrorReason.CONTENT_MISMATCH,
                    f"group {group.group_id!r} was admitted with other content",
                    {"group": group.group_id},
                )
            return
        if group.status != _OPEN:
            raise ValueError(f"group {group.group_id!r}: it is admitted as an open group")
        value = group.SerializeToString()
        checks.check_size(group.group_id, len(value), checks.MAX_GROUP_BYTES)
        self._draft.put(Table.GRAPH, key, value)
        self._draft.event(self._run_id, group_event(group))
        self._open_subgraphs(group)

    def write_vertex(self, vertex: graph_pb2.Vertex) -> WriteOutcome:
        """Decide over one vertex."""
        meta = vertex.meta
        checks.check_meta(meta)
        has_payload = vertex.HasField("payload")
        objects = checks.check_payload(vertex, self._entry.columns)
        vertex_id = meta.vertex_id
        key = keys.row(self._run_id, meta.agent, vertex_id)
        columns = encode_meta(meta)
        payload = vertex.payload.SerializeToString(deterministic=True) if has_payload else b""
        checks.check_size(vertex_id, len(columns), checks.MAX_META_BYTES)
        checks.check_size(vertex_id, len(payload), checks.MAX_PAYLOAD_BYTES)
        known = self._draft.get(Table.ROWS, key)
        same = known is not None and self._is_same(key, known, columns, payload)
        outcome = graph_rules.decide_vertex(
            known=known is not None or self._is_another_agents(vertex_id),
            same=same,
            late=not self._is_group_open(meta.group_id) or self._is_sample_over(meta.sample_id),
            subgraph_closed=self._is_closed(meta),
        )
        if outcome is WriteOutcome.ACCEPTED:
            self._accept(key, meta, columns, payload)
            for object_key in objects:
                self._objects.refer(self._draft, object_key)
        elif outcome is WriteOutcome.DUPLICATE:
            self._keep_late(vertex_id, vertex.SerializeToString(deterministic=True))
        return outcome

    def write_sample(self, sample: graph_pb2.Sample) -> WriteOutcome:
        """Decide over one sample."""
        checks.check_sample(sample)
        key = keys.join("sample", self._run_id, sample.sample_id)
        known = self._draft.get(Table.GRAPH, key)
        stored = None if known is None else graph_pb2.Sample.FromString(known)
        if stored is not None and stored.status == sample.status == _SAMPLE_OPEN:
            sample = _with_left(stored, sample)
        value = sample.SerializeToString(deterministic=True)
        checks.check_size(sample.sample_id, len(value), checks.MAX_SAMPLE_BYTES)
        old = None if stored is None else stored.status
        outcome = graph_rules.decide_sample(
            known=None if old is None else SAMPLE_STATUS.to_core(old),
            new=SAMPLE_STATUS.to_core(sample.status),
            same=value == known,
            group_open=self._is_group_open(sample.group_id),
        )
        if outcome is WriteOutcome.ACCEPTED:
            self._draft.put(Table.GRAPH, key, value)
            if stored is None or _is_news(stored, sample):
                event = pb.Event(kind=pb.EVENT_KIND_SAMPLE, sample=sample)
                self._draft.event(self._run_id, event)
        elif outcome is WriteOutcome.DUPLICATE:
            self._keep_late(sample.sample_id, value)
        return outcome

    def check_edges(self) -> None:
        """Check the edges into the accepted vertices."""
        graph_rules.check_edges(self._new_edges, is_stored=self._is_stored)
        self._draft.at_commit.append(lambda: self._recent.add(self._run_id, self._new_edges))

    def _accept(
        self, key: bytes, meta: graph_pb2.VertexMeta, columns: bytes, payload: bytes
    ) -> None:
        self._draft.put(Table.ROWS, key, columns)
        self._draft.put(Table.PAYLOADS, key, payload)
        self._runs.note_agent(self._draft, self._entry, meta.agent)
        self._new_edges[meta.vertex_id] = list(meta.upstream_vertex_ids)
        if self._entry.run.vertex_events:
            event = pb.Event(kind=pb.EVENT_KIND_VERTEX, vertex=meta)
            self._draft.event(self._run_id, event)

    def _keep_late(self, row_id: str, value: bytes) -> None:
        # The same late result again takes the same key, so repetition does not fill the table.
        digest = hashlib.sha256(value).digest()[:8]
        self._draft.put(Table.LATE, keys.prefix(self._run_id, row_id) + digest, value)
        self.num_late += 1

    def _is_another_agents(self, vertex_id: str) -> bool:
        """Whether a vertex that is not in its agent's table was accepted for another agent lately.

        To look into every agent's table would double what a row costs; a call that is repeated
        as another agent's follows soon, and `store check` finds the rest.
        """
        return vertex_id in self._new_edges or (self._run_id, vertex_id) in self._recent

    def _is_same(self, key: bytes, known: bytes, columns: bytes, payload: bytes) -> bool:
        if known != columns:
            stored = graph_pb2.VertexMeta.FromString(known)
            for name in ("reward", "advantage", "void_reason", "micro_batch_id", "merged_into"):
                stored.ClearField(name)  # what training added since
            late = set(stored.ready_columns) & set(self._entry.columns)
            late -= set(graph_pb2.VertexMeta.FromString(columns).ready_columns)
            kept = [name for name in stored.ready_columns if name not in late]
            del stored.ready_columns[:]
            stored.ready_columns.extend(kept)
            if encode_meta(stored) != columns:
                return False
            if late:
                return self._payload_without(key, late) == payload
        return self._draft.get(Table.PAYLOADS, key) == payload

    def _payload_without(self, key: bytes, late: Iterable[str]) -> bytes:
        """The stored payload as it was before these columns were written."""
        payload = graph_pb2.VertexPayload.FromString(self._draft.get(Table.PAYLOADS, key) or b"")
        for name in late:
            del payload.columns[name]
        return payload.SerializeToString(deterministic=True)

    def _is_group_open(self, group_id: str) -> bool:
        known = self._group_open.get(group_id)
        if known is None:
            value = self._draft.get(Table.GRAPH, keys.join("group", self._run_id, group_id))
            if value is None:
                raise DomainError(
                    ErrorReason.NOT_FOUND,
                    f"group {group_id!r} was not admitted to run {self._run_id!r}",
                    {"group": group_id},
                )
            known = graph_pb2.Group.FromString(value).status == _OPEN
            self._group_open[group_id] = known
        return known

    def _is_sample_over(self, sample_id: str) -> bool:
        known = self._sample_over.get(sample_id)
        if known is None:
            value = self._draft.get(Table.GRAPH, keys.join("sample", self._run_id, sample_id))
            known = value is not None and SAMPLE.is_terminal(
                SAMPLE_STATUS.to_core(graph_pb2.Sample.FromString(value).status)
            )
            self._sample_over[sample_id] = known
        return known

    def _is_closed(self, meta: graph_pb2.VertexMeta) -> bool:
        if is_evaluation(meta.vertex_id):
            return False  # what is never trained on may end whenever it likes
        scope = (meta.batch, meta.batch_attempt)
        known = self._closed.get(scope)
        if known is None:
            known = self._closed[scope] = closed_policies(self._draft, self._run_id, *scope)
        return meta.policy in known

    def _open_subgraphs(self, group: graph_pb2.Group) -> None:
        """What was closed was closed for the groups that were known then."""
        if is_evaluation(group.group_id):
            return
        scope = (group.batch, group.batch_attempt)
        if closed_policies(self._draft, self._run_id, *scope):
            self._draft.delete(Table.META, closed_key(self._run_id, *scope))

    def _is_stored(self, vertex_id: str) -> bool:
        if (self._run_id, vertex_id) in self._recent:
            return True
        return any(
            self._draft.get(Table.ROWS, keys.row(self._run_id, agent, vertex_id)) is not None
            for agent in sorted(self._entry.agents)
        )


def _with_left(stored: graph_pb2.Sample, written: graph_pb2.Sample) -> graph_pb2.Sample:
    """An open sample's row: what it has left and used only grows.

    A sample that is admitted again, by a dispatcher that knows nothing of it yet, changes nothing.
    """
    row = graph_pb2.Sample()
    row.CopyFrom(stored)
    for name in ("left_policies", "used_policies"):
        known = getattr(row, name)
        known.extend(policy for policy in getattr(written, name) if policy not in known)
    return row


def _is_news(stored: graph_pb2.Sample, row: graph_pb2.Sample) -> bool:
    return row.status != stored.status or len(row.left_policies) > len(stored.left_policies)


def closed_key(run_id: str, batch: int, batch_attempt: int) -> bytes:
    """Key of a batch's closed subgraphs: the names of their policies, joined by NUL."""
    return keys.join("closed", run_id, str(batch), str(batch_attempt))


def closed_policies(draft: Draft, run_id: str, batch: int, batch_attempt: int) -> list[str]:
    """Policies whose subgraph of a batch is closed."""
    value = draft.get(Table.META, closed_key(run_id, batch, batch_attempt))
    return value.decode().split("\0") if value else []


def group_event(group: graph_pb2.Group) -> pb.Event:
    """Event of a group's new state, without its query."""
    event = pb.Event(kind=pb.EVENT_KIND_GROUP, group=group)
    event.group.ClearField("query_json")
    return event


def _admission(group: graph_pb2.Group) -> bytes:
    kept = graph_pb2.Group()
    kept.CopyFrom(group)
    for name in (
        "status",
        "drop_reason",
        "min_version",
        "max_version",
        "opened_unix_ns",
        "closed_unix_ns",
    ):
        kept.ClearField(name)  # what changes after admission
    return kept.SerializeToString(deterministic=True)
