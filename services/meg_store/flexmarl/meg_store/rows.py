"""Vertex rows within one mutation: find by reference, change, write back once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
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


class _Loaded(NamedTuple):
    key: bytes
    claimable: bool


class Rows:
    """Rows of a run that one draft reads and changes; keeps the list of claimable rows true."""

    def __init__(self, draft: Draft, entry: RunEntry, claims: Claims, *, shard: str) -> None:
        self._draft = draft
        self._run_id = entry.run_id
        self._required = entry.required
        self._claims = claims
        self._shard = shard
        self._owner_prefix = keys.prefix("owner", entry.run_id)
        self._loaded: dict[str, _Loaded] = {}
        self._followed = False
        # As this draft has them: what was read, then what was written.
        self._rows: dict[bytes, bytes | None] = {}
        self._owners: dict[str, bytes | None] = {}

    def prefetch(self, refs: Iterable[common_pb2.VertexRef], *, owners: bool = False) -> None:
        """Read rows, and who owns them, at once: the database answers many keys faster than each.

        Args:
            refs: Rows that will be loaded.
            owners: Their owners will be asked for, too.
        """
        here = [ref for ref in refs if self.is_here(ref)]
        names = [self.key(ref) for ref in here]
        self._rows.update(zip(names, self._draft.get_many(Table.ROWS, names), strict=True))
        if owners:
            ids = [ref.vertex_id for ref in here]
            names = [self._owner_key(vertex_id) for vertex_id in ids]
            self._owners.update(zip(ids, self._draft.get_many(Table.MARKS, names), strict=True))

    def is_here(self, ref: common_pb2.VertexRef) -> bool:
        """Whether a reference names this shard."""
        shard = ref.shard
        return not shard or shard == self._shard

    def is_complete(self, meta: graph_pb2.VertexMeta) -> bool:
        """Whether a row has the declared columns that it must have."""
        return is_complete(meta, self._required)

    def load(self, ref: common_pb2.VertexRef) -> graph_pb2.VertexMeta:
        """Meta columns of a row.

        Raises:
            DomainError: VERTEX_NOT_FOUND.
        """
        value = None
        key = self.key(ref)
        if self.is_here(ref):
            value = self._rows[key] if key in self._rows else self._draft.get(Table.ROWS, key)
        if value is None:
            raise vertex_not_found(ref, self._shard)
        meta = graph_pb2.VertexMeta.FromString(value)
        self._loaded[meta.vertex_id] = _Loaded(key, is_claimable(meta, self._required))
        return meta

    def store(self, meta: graph_pb2.VertexMeta) -> None:
        """Write back the meta columns of a loaded row."""
        vertex_id = meta.vertex_id
        key, was = self._loaded[vertex_id]
        value = self._rows[key] = encode_meta(meta)
        self._draft.put(Table.ROWS, key, value)
        now = is_claimable(meta, self._required)
        if was == now:
            return
        self._loaded[vertex_id] = _Loaded(key, now)
        claim = claim_key(self._run_id, meta.policy, vertex_id)
        if now:
            self._draft.put(Table.MARKS, claim, claim_value(meta, shard=self._shard))
        else:
            self._draft.delete(Table.MARKS, claim)
        if not self._followed:
            self._followed = True
            self._draft.after_ack.append(partial(self._claims.applied, self._draft.batch))

    def owner(self, vertex_id: str) -> str | None:
        """Micro-batch whose record names the row."""
        if vertex_id in self._owners:
            value = self._owners[vertex_id]
        else:
            value = self._draft.get(Table.MARKS, self._owner_key(vertex_id))
        return None if value is None else value.decode()

    def own(self, vertex_id: str, micro_batch_id: str) -> None:
        """Give the row to a micro-batch."""
        value = self._owners[vertex_id] = micro_batch_id.encode()
        self._draft.put(Table.MARKS, self._owner_key(vertex_id), value)

    def _owner_key(self, vertex_id: str) -> bytes:
        return self._owner_prefix + vertex_id.encode()

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
