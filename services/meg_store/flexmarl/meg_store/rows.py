"""Vertex rows within one mutation: find by reference, change, write back once."""

from __future__ import annotations

from collections.abc import Iterable

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.meg_store.v1alpha1 import graph_pb2
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.claims import (
    Claims,
    claim_key,
    claim_value,
    is_claimable,
    is_complete,
)
from flexmarl.meg_store.database import Draft
from flexmarl.meg_store.runs import RunEntry


class Rows:
    """Rows of a run that one draft reads and changes; keeps the list of claimable rows true."""

    def __init__(self, draft: Draft, entry: RunEntry, claims: Claims, *, shard: str) -> None:
        self._draft = draft
        self._run_id = entry.run_id
        self._required = entry.required
        self._claims = claims
        self._shard = shard
        self._claimable: dict[str, bool] = {}
        self._followed = False
        self._read: dict[tuple[Table, bytes], bytes | None] = {}

    def prefetch(self, refs: Iterable[common_pb2.VertexRef], *, owners: bool = False) -> None:
        """Read rows, and who owns them, at once: the database answers many keys faster than each.

        Args:
            refs: Rows that will be loaded.
            owners: Their owners will be asked for, too.
        """
        here = [ref for ref in refs if self.is_here(ref)]
        self._prefetch(Table.ROWS, [self.key(ref) for ref in here])
        if owners:
            self._prefetch(Table.MARKS, [self._owner_key(ref.vertex_id) for ref in here])

    def _prefetch(self, table: Table, names: list[bytes]) -> None:
        values = self._draft.get_many(table, names)
        self._read.update(((table, name), value) for name, value in zip(names, values, strict=True))

    def _get(self, table: Table, key: bytes) -> bytes | None:
        if (table, key) in self._read and key not in self._draft.batch.writes[table]:
            return self._read[table, key]
        return self._draft.get(table, key)

    def is_here(self, ref: common_pb2.VertexRef) -> bool:
        """Whether a reference names this shard."""
        return ref.shard in ("", self._shard)

    def is_complete(self, meta: graph_pb2.VertexMeta) -> bool:
        """Whether a row has the declared columns that it must have."""
        return is_complete(meta, self._required)

    def load(self, ref: common_pb2.VertexRef) -> graph_pb2.VertexMeta:
        """Meta columns of a row.

        Raises:
            DomainError: VERTEX_NOT_FOUND.
        """
        value = None
        if self.is_here(ref):
            value = self._get(Table.ROWS, self.key(ref))
        if value is None:
            raise vertex_not_found(ref, self._shard)
        meta = graph_pb2.VertexMeta.FromString(value)
        self._claimable[meta.vertex_id] = is_claimable(meta, self._required)
        return meta

    def store(self, meta: graph_pb2.VertexMeta) -> None:
        """Write back the meta columns of a loaded row."""
        vertex_id = meta.vertex_id
        key = keys.row(self._run_id, meta.agent, vertex_id)
        self._draft.put(Table.ROWS, key, encode_meta(meta))
        was, now = self._claimable[vertex_id], is_claimable(meta, self._required)
        if was == now:
            return
        self._claimable[vertex_id] = now
        claim = claim_key(self._run_id, meta.policy, vertex_id)
        if now:
            self._draft.put(Table.MARKS, claim, claim_value(meta, shard=self._shard))
        else:
            self._draft.delete(Table.MARKS, claim)
        if not self._followed:
            self._followed = True
            self._draft.after_ack.append(lambda: self._claims.applied(self._draft.batch))

    def owner(self, vertex_id: str) -> str | None:
        """Micro-batch whose record names the row."""
        value = self._get(Table.MARKS, self._owner_key(vertex_id))
        return None if value is None else value.decode()

    def own(self, vertex_id: str, micro_batch_id: str) -> None:
        """Give the row to a micro-batch."""
        self._draft.put(Table.MARKS, self._owner_key(vertex_id), micro_batch_id.encode())

    def _owner_key(self, vertex_id: str) -> bytes:
        return keys.join("owner", self._run_id, vertex_id)

    def key(self, ref: common_pb2.VertexRef) -> bytes:
        """Key of a row."""
        return keys.row(self._run_id, ref.agent, ref.vertex_id)


def encode_meta(meta: graph_pb2.VertexMeta) -> bytes:
    """Stored form of meta columns; equal content gives equal bytes."""
    return meta.SerializeToString(deterministic=True)


def vertex_not_found(ref: common_pb2.VertexRef, shard: str) -> DomainError:
    """The refusal of a reference that names no row of this shard."""
    return DomainError(
        ErrorReason.VERTEX_NOT_FOUND,
        f"no vertex {ref.vertex_id!r} of agent {ref.agent!r} in shard {shard!r}"
        + ("" if ref.shard in ("", shard) else f"; it lives in {ref.shard!r}"),
        {"vertex": ref.vertex_id, "agent": ref.agent},
    )
