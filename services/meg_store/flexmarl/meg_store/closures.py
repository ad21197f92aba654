"""CloseGroups, VoidRows, CloseSubgraph: what training may use, and what it may not."""

from __future__ import annotations

import time

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.enums import GROUP_STATUS, VERTEX_STATUS, VOID_REASON
from flexmarl.core import fencing, graph_rules
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.graph_rules import WriteOutcome
from flexmarl.core.ids import check_name
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.claims import Claims
from flexmarl.meg_store.database import Draft
from flexmarl.meg_store.graph_writes import group_event
from flexmarl.meg_store.rows import Rows
from flexmarl.meg_store.runs import Runs
from flexmarl.meg_store.write_scope import closed_key, closed_policies

_NOT_VOID = common_pb2.VOID_REASON_UNSPECIFIED


class Closures:
    """Ends groups and subgraphs, releases and voids rows."""

    def __init__(self, runs: Runs, claims: Claims, *, shard: str) -> None:
        self._runs = runs
        self._claims = claims
        self._shard = shard

    def close_groups(self, draft: Draft, request: pb.CloseGroupsRequest) -> pb.CloseGroupsResponse:
        """End groups; the same end again changes nothing.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE, NOT_FOUND for a group, VERTEX_NOT_FOUND,
                STATE_TRANSITION_REFUSED, REWARD_INVALID, INVALID_ARGUMENT.
        """
        rows = self._start(draft, request.run_id, request.term)
        for closure in request.closures:
            self._close_group(draft, request.run_id, rows, closure)
        return pb.CloseGroupsResponse()

    def void_rows(self, draft: Draft, request: pb.VoidRowsRequest) -> pb.VoidRowsResponse:
        """Void rows; one that is void already keeps its first reason.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE, VERTEX_NOT_FOUND, INVALID_ARGUMENT.
        """
        rows = self._start(draft, request.run_id, request.term)
        for voided in request.rows:
            _void(rows, rows.load(voided.row), voided.reason)
        return pb.VoidRowsResponse()

    def close_subgraph(
        self, draft: Draft, request: pb.CloseSubgraphRequest
    ) -> pb.CloseSubgraphResponse:
        """Mark subgraphs closed; a mark that is there stays.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE.
        """
        self._start(draft, request.run_id, request.term)
        for mark in request.subgraphs:
            policy = check_name(mark.policy, what="policy")
            scope = (request.run_id, mark.batch, mark.batch_attempt)
            closed = closed_policies(draft, *scope)
            if policy not in closed:
                value = "\0".join((*closed, policy)).encode()
                draft.put(Table.META, closed_key(*scope), value)
                event = pb.Event(kind=pb.EVENT_KIND_SUBGRAPH_CLOSED, closed_subgraph=mark)
                draft.event(request.run_id, event)
        return pb.CloseSubgraphResponse()

    def _start(self, draft: Draft, run_id: str, term: int) -> Rows:
        entry = self._runs.require(run_id)
        self._runs.check_term(draft, entry, fencing.ORCHESTRATOR_SCOPE, term)
        return Rows(draft, entry, self._claims, shard=self._shard)

    def _close_group(self, draft: Draft, run_id: str, rows: Rows, closure: pb.GroupClosure) -> None:
        key = keys.join("group", run_id, closure.group_id)
        value = draft.get(Table.GRAPH, key)
        if value is None:
            raise DomainError(
                ErrorReason.NOT_FOUND,
                f"no group {closure.group_id!r} in run {run_id!r}",
                {"group": closure.group_id},
            )
        group = graph_pb2.Group.FromString(value)
        outcome = graph_rules.decide_closure(
            group.group_id,
            known=GROUP_STATUS.to_core(group.status),
            new=GROUP_STATUS.to_core(closure.status),
        )
        _check_closure(closure)
        rows.prefetch(released.row for released in closure.released)
        rows.prefetch(voided.row for voided in closure.voided)
        changed, versions = _release_and_void(rows, closure)
        if outcome is WriteOutcome.UNCHANGED:
            if changed:
                raise DomainError(
                    ErrorReason.STATE_TRANSITION_REFUSED,
                    f"group {group.group_id!r} was closed with other rows",
                    {"group": group.group_id},
                )
            return
        group.status = closure.status
        group.drop_reason = closure.drop_reason
        group.closed_unix_ns = time.time_ns()
        if versions:
            group.min_version, group.max_version = min(versions), max(versions)
        draft.put(Table.GRAPH, key, group.SerializeToString())
        draft.event(run_id, group_event(group))


def _check_closure(closure: pb.GroupClosure) -> None:
    dropped = closure.status == common_pb2.GROUP_STATUS_DROPPED
    if dropped != (closure.drop_reason != _NOT_VOID):
        raise ValueError(
            f"group {closure.group_id!r}: a dropped group has a drop_reason, a closed one has none"
        )
    if dropped and closure.released:
        raise ValueError(f"group {closure.group_id!r}: a dropped group releases no rows")


def _release_and_void(rows: Rows, closure: pb.GroupClosure) -> tuple[int, set[int]]:
    """Returns how many rows changed, and the versions that sampled tokens of any of them."""
    changed = 0
    versions: set[int] = set()
    for released in closure.released:
        meta = _load_of_group(rows, released.row, closure.group_id)
        versions.update(run.version for run in meta.version_runs)
        stored = (meta.reward, meta.advantage) if meta.HasField("advantage") else None
        outcome = graph_rules.decide_release(
            meta.vertex_id,
            status=VERTEX_STATUS.to_core(meta.status),
            trainable=meta.trainable,
            is_void=meta.void_reason != _NOT_VOID and stored is None,
            stored=stored,
            reward=released.reward,
            advantage=released.advantage,
        )
        if outcome is WriteOutcome.ACCEPTED:
            meta.reward = released.reward
            meta.advantage = released.advantage
            meta.merged_into = released.merged_into
            rows.store(meta)
            changed += 1
    for voided in closure.voided:
        meta = _load_of_group(rows, voided.row, closure.group_id)
        versions.update(run.version for run in meta.version_runs)
        changed += _void(rows, meta, voided.reason)
    return changed, versions


def _void(rows: Rows, meta: graph_pb2.VertexMeta, reason: common_pb2.VoidReason.ValueType) -> bool:
    VOID_REASON.to_core(reason)
    if meta.void_reason != _NOT_VOID:
        return False
    meta.void_reason = reason
    rows.store(meta)
    return True


def _load_of_group(rows: Rows, ref: common_pb2.VertexRef, group_id: str) -> graph_pb2.VertexMeta:
    meta = rows.load(ref)
    if meta.group_id != group_id:
        raise ValueError(f"row {ref.vertex_id!r} is not of group {group_id!r}")
    return meta
