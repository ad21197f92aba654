"""Segments of state, rank by rank: one copy for as many ranks as wrote it, exact for any other."""

from __future__ import annotations

import os
from itertools import product

import numpy as np
import pytest

from flexmarl.api.meg_store.v1 import meg_store_pb2
from flexmarl.client.buffers import lay_out
from flexmarl.trainer.state_layout import Block, block_of, plan_copies, segment_specs

SHAPES = {"embed": (7, 3), "norm": (3,), "head": (8, 5, 2), "bias": (1, 4)}
PARAMETERS = [
    meg_store_pb2.NamedBuffer(
        name=name, dtype="F32", shape=shape, size_bytes=int(np.prod(shape)) * 4
    )
    for name, shape in SHAPES.items()
]
WORLDS = (1, 2, 3, 4, 9)


def layout(kind: str, world_size: int) -> tuple[meg_store_pb2.NamedBuffer, ...]:
    specs = segment_specs(kind, PARAMETERS, weights_dtype="float32", world_size=world_size)
    return lay_out(specs).buffers


def blocks(world_size: int) -> list[Block]:
    return [block_of(PARAMETERS, rank=rank, world_size=world_size) for rank in range(world_size)]


def move(kind: str, buffers, block: Block, memory: bytearray, file: bytearray, *, out: bool) -> int:
    copies = plan_copies(kind, block, buffers)
    for copy in copies:
        ours = slice(copy.memory, copy.memory + copy.size_bytes)
        theirs = slice(copy.file, copy.file + copy.size_bytes)
        if out:
            file[theirs] = memory[ours]
        else:
            memory[ours] = file[theirs]
    return len(copies)


@pytest.mark.parametrize(("kind", "world_size"), list(product(("master", "moments"), WORLDS)))
def test_a_rank_moves_its_part_in_one_copy(kind: str, world_size: int) -> None:
    buffers = layout(kind, world_size)
    for block in blocks(world_size):
        copies = plan_copies(kind, block, buffers)
        assert len(copies) == (1 if block.size_bytes else 0)


@pytest.mark.parametrize(
    ("kind", "before", "after"), product(("master", "moments"), WORLDS, WORLDS)
)
def test_state_of_any_number_of_ranks_loads_on_any_other(
    kind: str, before: int, after: int
) -> None:
    values = 2 if kind == "moments" else 1
    content = bytearray(os.urandom(1 << 12))
    first = layout(kind, before)
    again = layout(kind, before)
    second = layout(kind, after)
    there, back = bytearray(1 << 12), bytearray(1 << 12)
    for source, target, world_size in ((content, there, after), (there, back, before)):
        for block in blocks(world_size):
            memory = bytearray(values * block.size_bytes)
            stored = first if source is content else second
            move(kind, stored, block, memory, source, out=False)
            written = second if source is content else again
            move(kind, written, block, memory, target, out=True)
    for buffer in first:
        span = slice(buffer.offset, buffer.offset + buffer.size_bytes)
        assert back[span] == content[span], buffer.name


def test_padding_of_the_last_tensor_stays_inside() -> None:
    for world_size in WORLDS:
        for block in blocks(world_size):
            assert block.padded_bytes >= block.size_bytes
            for piece in block.pieces:
                assert piece.offset + piece.padded_rows * piece.row_bytes <= block.padded_bytes


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "more"])
def test_state_of_another_model_is_refused_by_the_tensors_name(change: str) -> None:
    buffers = [
        meg_store_pb2.NamedBuffer.FromString(b.SerializeToString()) for b in layout("master", 1)
    ]
    match change:
        case "name":
            buffers[2].name = "other"
        case "shape":
            buffers[2].shape[1] = 6
        case "dtype":
            buffers[2].dtype = "F64"
        case "more":
            buffers.append(meg_store_pb2.NamedBuffer(name="other", dtype="F32", shape=[1]))
    with pytest.raises(ValueError, match="other" if change == "more" else "head"):
        plan_copies("master", block_of(PARAMETERS, rank=0, world_size=1), buffers)
