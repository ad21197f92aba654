"""Vertex rows within one mutation: find by reference, change, write back once."""

from __future__ import annotations

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.meg_store.v1alpha1 import graph_pb2
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Draft


class Rows:
    """Rows of a run that one draft reads and changes."""

    def __init__(self, draft: Draft, run_id: str, *, shard: str) -> None:
        self._draft = draft
        self._run_id = run_id
        self._shard = shard

    def is_here(self, ref: common_pb2.VertexRef) -> bool:
        """Whether a reference names this shard."""
        return ref.shard in ("", self._shard)

    def load(self, ref: common_pb2.VertexRef) -> graph_pb2.VertexMeta:
        """Meta columns of a row.

        Raises:
            DomainError: VERTEX_NOT_FOUND.
        """
        value = None
        if self.is_here(ref):
            value = self._draft.get(Table.ROWS, self._key(ref.agent, ref.vertex_id))
        if value is None:
            raise vertex_not_found(ref, self._shard)
        return graph_pb2.VertexMeta.FromString(value)

    def store(self, meta: graph_pb2.VertexMeta) -> None:
        """Write meta columns back, and keep the list of claimable rows true."""
        key = self._key(meta.agent, meta.vertex_id)
        self._draft.put(Table.ROWS, key, encode_meta(meta))
        claim = b"claim\0" + key
        if is_claimable(meta):
            self._draft.put(Table.MARKS, claim, b"")
        elif meta.HasField("advantage"):
            self._draft.delete(Table.MARKS, claim)

    def owner(self, vertex_id: str) -> str | None:
        """Micro-batch whose record names the row."""
        value = self._draft.get(Table.MARKS, keys.join("owner", self._run_id, vertex_id))
        return None if value is None else value.decode()

    def own(self, vertex_id: str, micro_batch_id: str) -> None:
        """Give the row to a micro-batch."""
        key = keys.join("owner", self._run_id, vertex_id)
        self._draft.put(Table.MARKS, key, micro_batch_id.encode())

    def _key(self, agent: str, vertex_id: str) -> bytes:
        return keys.row(self._run_id, agent, vertex_id)


def encode_meta(meta: graph_pb2.VertexMeta) -> bytes:
    """Stored form of meta columns; equal content gives equal bytes."""
    return meta.SerializeToString(deterministic=True)


def is_claimable(meta: graph_pb2.VertexMeta) -> bool:
    """Whether the row is released, not void and not marked."""
    return (
        meta.HasField("advantage")
        and meta.void_reason == common_pb2.VOID_REASON_UNSPECIFIED
        and not meta.micro_batch_id
    )


def vertex_not_found(ref: common_pb2.VertexRef, shard: str) -> DomainError:
    """The refusal of a reference that names no row of this shard."""
    return DomainError(
        ErrorReason.VERTEX_NOT_FOUND,
        f"no vertex {ref.vertex_id!r} of agent {ref.agent!r} in shard {shard!r}"
        + ("" if ref.shard in ("", shard) else f"; it lives in {ref.shard!r}"),
        {"vertex": ref.vertex_id, "agent": ref.agent},
    )
