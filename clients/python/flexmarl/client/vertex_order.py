"""How listings of vertices sort: for the store, which sorts, and the client, which merges."""

from __future__ import annotations

import struct
from typing import Final

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb

_INTEGER: Final = struct.Struct(">q")
_FLOAT: Final = struct.Struct(">d")
_NO_REWARD: Final = -(1 << 63)


def rank(meta: graph_pb2.VertexMeta, order: pb.VertexOrder.ValueType) -> int:
    """A number that sorts as asked, signed, of 64 bits; ties go by agent, then by id."""
    if order == pb.VERTEX_ORDER_FINISHED:
        return meta.finished_unix_ns
    if order == pb.VERTEX_ORDER_DURATION:
        return meta.finished_unix_ns - meta.ready_unix_ns
    if order == pb.VERTEX_ORDER_TOKENS:
        return meta.num_prompt_tokens + meta.num_response_tokens
    if order == pb.VERTEX_ORDER_REWARD:
        return _rank_of_float(meta.reward) if meta.HasField("reward") else _NO_REWARD
    return 0


def place(meta: graph_pb2.VertexMeta, order: pb.VertexOrder.ValueType) -> tuple[int, str, str]:
    """Where a vertex comes in a listing."""
    return rank(meta, order), meta.agent, meta.vertex_id


def _rank_of_float(value: float) -> int:
    """An integer that sorts like the float: IEEE 754 bits, those of negative numbers reversed."""
    (bits,) = _INTEGER.unpack(_FLOAT.pack(value + 0.0))
    number: int = bits
    return number if number >= 0 else number ^ ((1 << 63) - 1)
