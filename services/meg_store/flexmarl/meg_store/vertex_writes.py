"""The vertices of one WriteGraph: which are new, and what they are written as."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Final

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import graph_rules
from flexmarl.core import store_keys as keys
from flexmarl.core.graph_rules import WriteOutcome
from flexmarl.meg_store import wire
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Draft
from flexmarl.meg_store.objects import Objects
from flexmarl.meg_store.rows import encode_meta
from flexmarl.meg_store.runs import RunEntry, Runs
from flexmarl.meg_store.write_scope import WriteScope
from flexmarl.meg_store.written_graph import CheckedVertex, CheckedVertices

_RECENT_VERTICES: Final = 32768
_NONE: Final[frozenset[str]] = frozenset()


class RecentVertices:
    """Which vertices were accepted lately: answers most edges without asking the backend.

    Two generations, of which the older one is dropped when the younger one is full: ids come and
    go by the call, not one by one.
    """

    def __init__(self) -> None:
        self._young: dict[str, set[str]] = {}
        self._old: dict[str, set[str]] = {}
        self._num_young = 0

    def add(self, run_id: str, vertex_ids: Sequence[str]) -> None:
        """Remember some."""
        if self._num_young >= _RECENT_VERTICES:
            self._old, self._young, self._num_young = self._young, {}, 0
        self._young.setdefault(run_id, set()).update(vertex_ids)
        self._num_young += len(vertex_ids)

    def forget(self, run_id: str) -> None:
        """Drop those of a run."""
        self._young.pop(run_id, None)
        self._old.pop(run_id, None)

    def has(self, run_id: str, vertex_id: str) -> bool:
        """Whether a vertex is remembered."""
        return vertex_id in self._young.get(run_id, ()) or vertex_id in self._old.get(run_id, ())

    def has_any(self, run_id: str, vertex_ids: Set[str]) -> bool:
        """Whether any of some is remembered."""
        generations = (self._young, self._old)
        return not all(known.get(run_id, _NONE).isdisjoint(vertex_ids) for known in generations)


class VertexWrites:
    """Decides over the vertices of one call."""

    def __init__(
        self,
        draft: Draft,
        entry: RunEntry,
        runs: Runs,
        objects: Objects,
        recent: RecentVertices,
        scope: WriteScope,
    ) -> None:
        self._draft = draft
        self._entry = entry
        self._run_id = entry.run_id
        self._runs = runs
        self._objects = objects
        self._recent = recent
        self._scope = scope
        self._rows: dict[bytes, bytes] = {}
        self._payloads: dict[bytes, bytes] = {}
        self._edges: dict[str, Sequence[str]] = {}

    def write(self, checked: CheckedVertices) -> list[WriteOutcome]:
        """Decide over each, in order, then over their edges.

        Raises:
            DomainError: NOT_FOUND for a group, OBJECT_NOT_FOUND, INVALID_ARGUMENT for an edge.
        """
        if not checked.ids:
            return []
        stored = self._draft.get_many(Table.ROWS, checked.keys)
        if self._takes_all(checked, stored):
            outcomes = [WriteOutcome.ACCEPTED] * len(checked.ids)
            self._accept_all(checked)
        else:
            outcomes = [
                self._write(vertex, known, checked.upstream.get(vertex.vertex_id, ()))
                for vertex, known in zip(checked.each(), stored, strict=True)
            ]
        graph_rules.check_edges(self._edges, is_stored=self._is_stored)
        self._draft.put_many(Table.ROWS, self._rows)
        self._draft.put_many(Table.PAYLOADS, self._payloads)
        accepted = list(self._edges)
        self._draft.at_commit.append(partial(self._recent.add, self._run_id, accepted))
        return outcomes

    def _takes_all(self, checked: CheckedVertices, stored: Sequence[bytes | None]) -> bool:
        """Whether every vertex is new and accepted: the ordinary call, decided kind by kind."""
        ids = set(checked.ids)
        return (
            stored.count(None) == len(ids) == len(checked.ids)
            and not self._recent.has_any(self._run_id, ids)
            and all(
                self._decide(meta, known=False, same=False) is WriteOutcome.ACCEPTED
                for meta in checked.alike.values()
            )
        )

    def _accept_all(self, checked: CheckedVertices) -> None:
        self._rows = dict(zip(checked.keys, checked.columns, strict=True))
        payloads = [payload or b"" for payload in checked.payloads]
        self._payloads = dict(zip(checked.keys, payloads, strict=True))
        self._edges = {**dict.fromkeys(checked.ids, ()), **checked.upstream}
        for meta in checked.alike.values():
            self._note_agent(meta)
        for objects in checked.objects.values():
            self._refer(objects)
        if self._entry.run.vertex_events:
            for meta in checked.metas:
                self._tell(meta)

    def _write(
        self, vertex: CheckedVertex, known: bytes | None, upstream: Sequence[str]
    ) -> WriteOutcome:
        known = self._rows.get(vertex.key, known)  # it may come twice in one call
        outcome = self._decide(
            vertex.meta,
            known=known is not None or self._is_another_agents(vertex.vertex_id),
            same=known is not None and self._is_same(vertex, known),
        )
        if outcome is WriteOutcome.ACCEPTED:
            self._accept(vertex, upstream)
        elif outcome is WriteOutcome.DUPLICATE:
            late = wire.vertex(vertex.columns, vertex.payload)
            self._scope.keep_late(vertex.vertex_id, late)
        return outcome

    def _decide(self, meta: graph_pb2.VertexMeta, *, known: bool, same: bool) -> WriteOutcome:
        place = self._scope.place(meta)
        return graph_rules.decide_vertex(
            known=known,
            same=same,
            late=place.is_over,
            subgraph_closed=bool(place.closed) and meta.policy in place.closed,
        )

    def _accept(self, vertex: CheckedVertex, upstream: Sequence[str]) -> None:
        self._rows[vertex.key] = vertex.columns
        self._payloads[vertex.key] = vertex.payload or b""
        self._edges[vertex.vertex_id] = upstream
        self._note_agent(vertex.meta)
        self._refer(vertex.objects)
        if self._entry.run.vertex_events:
            self._tell(vertex.meta)

    def _note_agent(self, meta: graph_pb2.VertexMeta) -> None:
        if meta.agent not in self._entry.agents:
            self._runs.note_agent(self._draft, self._entry, meta.agent)

    def _refer(self, objects: Sequence[str]) -> None:
        for object_key in objects:
            self._objects.refer(self._draft, object_key)

    def _tell(self, meta: graph_pb2.VertexMeta) -> None:
        event = pb.Event(kind=pb.EVENT_KIND_VERTEX, vertex=meta)
        self._draft.event(self._run_id, event)

    def _is_another_agents(self, vertex_id: str) -> bool:
        """Whether a vertex that is not in its agent's table was accepted for another agent lately.

        To look into every agent's table would double what a row costs; a call that is repeated
        as another agent's follows soon, and `store check` finds the rest.
        """
        return vertex_id in self._edges or self._recent.has(self._run_id, vertex_id)

    def _is_same(self, vertex: CheckedVertex, known: bytes) -> bool:
        late: set[str] = set()
        if known != vertex.columns:
            stored = graph_pb2.VertexMeta.FromString(known)
            for name in ("reward", "advantage", "void_reason", "micro_batch_id", "merged_into"):
                stored.ClearField(name)  # what training added since
            late = set(stored.ready_columns) & set(self._entry.columns)
            late -= set(vertex.meta.ready_columns)
            kept = [name for name in stored.ready_columns if name not in late]
            del stored.ready_columns[:]
            stored.ready_columns.extend(kept)
            if encode_meta(stored) != vertex.columns:
                return False
        written = vertex.payload or b""
        payload = self._payloads.get(vertex.key)
        if payload is None:
            payload = self._draft.get(Table.PAYLOADS, vertex.key) or b""
        return payload == written or _plain(payload, without=late) == _plain(written)

    def _is_stored(self, vertex_id: str) -> bool:
        if self._recent.has(self._run_id, vertex_id):
            return True
        return any(
            self._draft.get(Table.ROWS, keys.row(self._run_id, agent, vertex_id)) is not None
            for agent in sorted(self._entry.agents)
        )


def _plain(payload: bytes, *, without: Iterable[str] = ()) -> bytes:
    """A payload so that equal content is equal bytes, whoever wrote them, without some columns."""
    message = graph_pb2.VertexPayload.FromString(payload)
    for name in without:
        del message.columns[name]
    return message.SerializeToString(deterministic=True)
