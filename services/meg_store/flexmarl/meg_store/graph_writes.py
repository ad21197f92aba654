"""WriteGraph: groups, samples and ended vertices in one atomic write.

Order within a call: groups are admitted, vertices are written, then samples change state; a vertex
in the same call as the end of its sample is therefore in time. Edges are columns of the downstream
vertex; there is no table of their own. Vertices write no events, unless the run asks for them: the
rows are found by their sample, whose end is an event.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.enums import SAMPLE_STATUS
from flexmarl.core import fencing, graph_rules, row_limits
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.graph_rules import WriteOutcome
from flexmarl.core.ids import is_evaluation
from flexmarl.meg_store import vertex_checks as checks
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Draft
from flexmarl.meg_store.objects import Objects
from flexmarl.meg_store.runs import Runs
from flexmarl.meg_store.vertex_writes import RecentVertices, VertexWrites
from flexmarl.meg_store.write_scope import WriteScope, closed_key, closed_policies
from flexmarl.meg_store.written_graph import CheckedVertices, WrittenGraph

_OUTCOMES = {
    WriteOutcome.ACCEPTED: pb.WRITE_OUTCOME_ACCEPTED,
    WriteOutcome.UNCHANGED: pb.WRITE_OUTCOME_UNCHANGED,
    WriteOutcome.DUPLICATE: pb.WRITE_OUTCOME_DUPLICATE,
    WriteOutcome.SUBGRAPH_CLOSED: pb.WRITE_OUTCOME_SUBGRAPH_CLOSED,
}
_OPEN = common_pb2.GROUP_STATUS_OPEN
_SAMPLE_OPEN = common_pb2.SAMPLE_STATUS_OPEN


class GraphWrites:
    """Writes the graph of all runs."""

    def __init__(self, runs: Runs, objects: Objects) -> None:
        self._runs = runs
        self._objects = objects
        self._recent = RecentVertices()
        self.num_late = 0

    def begin(self, request: WrittenGraph) -> GraphWrite:
        """Take up a request; nothing is looked at yet."""
        return GraphWrite(self, request)

    def check(self, request: WrittenGraph) -> CheckedVertices:
        """The request's vertices, to be checked against the run as it is now."""
        declared = self._runs.declared(request.run_id)
        return CheckedVertices(request.run_id, request.vertices, declared)

    def write(
        self, draft: Draft, request: WrittenGraph, checked: CheckedVertices
    ) -> pb.WriteGraphResponse:
        """Decide over every row of a request; see `GraphWrite.decide`."""
        entry = self._runs.require(request.run_id)
        self._runs.check_term(draft, entry, fencing.ORCHESTRATOR_SCOPE, request.term)
        if checked.declared != entry.columns:  # the run was made, or made anew, meanwhile
            checked = self.check(request)
        scope = WriteScope(draft, entry.run_id)
        rows = _Rows(draft, entry.run_id, scope)
        for group in request.groups:
            rows.admit(group)
        vertices = VertexWrites(draft, entry, self._runs, self._objects, self._recent, scope)
        checked.finish()
        vertex_outcomes = vertices.write(checked)
        sample_outcomes = [rows.write_sample(sample) for sample in request.samples]
        draft.at_commit.append(partial(self._count_late, scope.num_late))
        return pb.WriteGraphResponse(
            vertex_outcomes=[_OUTCOMES[outcome] for outcome in vertex_outcomes],
            sample_outcomes=[_OUTCOMES[outcome] for outcome in sample_outcomes],
        )

    def forget(self, run_id: str) -> None:
        """Drop what is remembered of a deleted run."""
        self._recent.forget(run_id)

    def _count_late(self, number: int) -> None:
        self.num_late += number


class GraphWrite:
    """One request: its vertices may be checked in slices, then it is decided in one go."""

    def __init__(self, writes: GraphWrites, request: WrittenGraph) -> None:
        self._writes = writes
        self._request = request
        self._checked = writes.check(request)

    def in_slices(self) -> Iterator[None]:
        """Check the vertices, with a pause between any two slices; refuses nothing yet."""
        return self._checked.in_slices()

    def decide(self, draft: Draft) -> pb.WriteGraphResponse:
        """Decide over every row, in the order groups, vertices, samples.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE, NOT_FOUND for a group that was not admitted,
                INVALID_ARGUMENT, REWARD_INVALID, MESSAGE_TOO_LARGE,
                CONTENT_MISMATCH, OBJECT_NOT_FOUND.
            ValueError: An id or a value is malformed.
        """
        return self._writes.write(draft, self._request, self._checked)


class _Rows:
    """Groups and samples of one request."""

    def __init__(self, draft: Draft, run_id: str, scope: WriteScope) -> None:
        self._draft = draft
        self._run_id = run_id
        self._scope = scope

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
        checks.check_size(group.group_id, len(value), row_limits.MAX_GROUP_BYTES)
        self._draft.put(Table.GRAPH, key, value)
        self._draft.event(self._run_id, group_event(group))
        self._open_subgraphs(group)

    def write_sample(self, sample: graph_pb2.Sample) -> WriteOutcome:
        """Decide over one sample."""
        checks.check_sample(sample)
        key = keys.join("sample", self._run_id, sample.sample_id)
        known = self._draft.get(Table.GRAPH, key)
        stored = None if known is None else graph_pb2.Sample.FromString(known)
        if stored is not None and stored.status == sample.status == _SAMPLE_OPEN:
            sample = _with_left(stored, sample)
        value = sample.SerializeToString(deterministic=True)
        checks.check_size(sample.sample_id, len(value), row_limits.MAX_SAMPLE_BYTES)
        old = None if stored is None else SAMPLE_STATUS.to_core(stored.status)
        new = SAMPLE_STATUS.to_core(sample.status)
        group_open = self._scope.is_group_open(sample.group_id)
        outcome = graph_rules.decide_sample(
            known=old, new=new, same=value == known, group_open=group_open
        )
        if outcome is WriteOutcome.ACCEPTED:
            self._draft.put(Table.GRAPH, key, value)
            if stored is None or _is_news(stored, sample):
                self._tell(sample)
        elif outcome is WriteOutcome.DUPLICATE:
            self._scope.keep_late(sample.sample_id, value)
            if stored is not None and graph_rules.ends_cancelled(
                known=old, new=new, group_open=group_open
            ):
                stored.status = common_pb2.SAMPLE_STATUS_CANCELLED
                stored.started_unix_ns = sample.started_unix_ns
                stored.finished_unix_ns = sample.finished_unix_ns
                self._draft.put(Table.GRAPH, key, stored.SerializeToString(deterministic=True))
                self._tell(stored)
        return outcome

    def _tell(self, sample: graph_pb2.Sample) -> None:
        self._draft.event(self._run_id, pb.Event(kind=pb.EVENT_KIND_SAMPLE, sample=sample))

    def _open_subgraphs(self, group: graph_pb2.Group) -> None:
        """What was closed was closed for the groups that were known then."""
        if is_evaluation(group.group_id):
            return
        scope = (group.batch, group.batch_attempt)
        if closed_policies(self._draft, self._run_id, *scope):
            self._draft.delete(Table.META, closed_key(self._run_id, *scope))


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
