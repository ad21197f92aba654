"""How a policy's state lies in segments and in the memory of ranks.

Weights, which engines load, are full tensors. What only trainers read (master, moments, gradients)
lies rank by rank: first all that rank 0 has, then rank 1, and so on. A rank's part of a segment is
byte for byte the block that it holds in memory, so it moves in one copy. Ranks cut every tensor
along its first dimension into equal runs (the last ones shorter, or empty), so whoever knows names
and shapes can put together what another number of ranks wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from flexmarl.api.meg_store.v1 import meg_store_pb2
from flexmarl.client.buffers import DTYPE_BYTES, BufferSpec, rank_part, tensor_of
from flexmarl.core.arena import ALIGNMENT, aligned

DTYPE_NAMES: Final = {"float64": "F64", "float32": "F32", "bfloat16": "BF16"}
"""Spelling of segments by that of a run's config."""

EXP_AVG: Final = "exp_avg."
EXP_AVG_SQ: Final = "exp_avg_sq."

MOMENTS: Final[dict[str, tuple[str, ...]]] = {
    "adamw": (EXP_AVG, EXP_AVG_SQ),
    "lion": (EXP_AVG,),
}
"""Prefixes of an optimizer's moments in a moments segment, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rank's rows of one tensor.

    Attributes:
        name: Name of the tensor.
        dtype: Element type.
        shape: Shape of the full tensor.
        start: First row.
        rows: Number of rows; 0 where the ranks before have all.
        offset: First byte in the rank's block.
        padded_rows: Rows that the largest rank has.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    rows: int
    offset: int
    padded_rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of its rows."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Block:
    """All that one rank has of one value per parameter: weights, one moment, or gradients.

    `moments` are the prefixes of its optimizer's.
    """

    pieces: tuple[Piece, ...]
    size_bytes: int
    moments: tuple[str, ...] = MOMENTS["adamw"]

    @property
    def padded_bytes(self) -> int:
        """Bytes up to the end of the largest rank's rows of any tensor; at least `size_bytes`."""
        ends = (piece.offset + piece.padded_rows * piece.row_bytes for piece in self.pieces)
        return aligned(max(self.size_bytes, *ends))


def block_of(
    parameters: Sequence[meg_store_pb2.NamedBuffer],
    *,
    rank: int,
    world_size: int,
    moments: tuple[str, ...] = MOMENTS["adamw"],
) -> Block:
    """Returns what a rank has of full parameters."""
    pieces = []
    offset = 0
    for item in parameters:
        padded = -(-item.shape[0] // world_size)
        start = min(rank * padded, item.shape[0])
        piece = Piece(
            name=item.name,
            dtype=item.dtype,
            shape=tuple(item.shape),
            start=start,
            rows=min(start + padded, item.shape[0]) - start,
            offset=offset,
            padded_rows=padded,
        )
        pieces.append(piece)
        offset += aligned(piece.size_bytes)
    return Block(tuple(pieces), offset, moments)


def segment_specs(
    kind: str,
    parameters: Sequence[meg_store_pb2.NamedBuffer],
    *,
    weights_dtype: str,
    world_size: int,
    moments: tuple[str, ...] = MOMENTS["adamw"],
) -> list[BufferSpec]:
    """Returns the buffers of one kind of state: "weights", "master", "moments" or "gradients".

    Args:
        kind: See above.
        parameters: Full parameters in the master dtype.
        weights_dtype: Dtype that engines load, as in the run's config.
        world_size: Ranks that write it.
        moments: Prefixes of the optimizer's moments.
    """
    if kind == "weights":
        dtype = DTYPE_NAMES[weights_dtype]
        return [BufferSpec(item.name, dtype, tuple(item.shape)) for item in parameters]
    return [
        BufferSpec(
            rank_part(prefix + piece.name, rank=rank, world_size=world_size),
            piece.dtype,
            (piece.rows, *piece.shape[1:]),
        )
        for rank in range(world_size)
        for prefix in prefixes_of(kind, moments)
        for piece in block_of(parameters, rank=rank, world_size=world_size).pieces
    ]


def prefixes_of(kind: str, moments: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the prefixes of names, one per value that a parameter has in this kind of state."""
    return moments if kind == "moments" else ("",)


def full_tensors(
    buffers: Sequence[meg_store_pb2.NamedBuffer],
) -> dict[str, list[meg_store_pb2.NamedBuffer]]:
    """Returns the buffers of each tensor's rows, in order, whatever ranks wrote them."""
    found: dict[str, list[meg_store_pb2.NamedBuffer]] = {}
    for buffer in buffers:
        found.setdefault(tensor_of(buffer.name), []).append(buffer)
    return found


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes that go from one place to another in one piece.

    Attributes:
        memory: First byte in the rank's memory of this kind of state.
        file: First byte in the segment.
        size_bytes: Number of bytes.
    """

    memory: int
    file: int
    size_bytes: int


def plan_copies(
    kind: str, block: Block, buffers: Sequence[meg_store_pb2.NamedBuffer]
) -> list[Copy]:
    """Returns how a rank's memory of one kind of state goes to or from a segment.

    As many ranks as wrote the segment: one copy. Another number: rows are put together.

    Raises:
        ValueError: The segment is of another model; names the tensor.
    """
    stored = full_tensors(buffers)
    prefixes = prefixes_of(kind, block.moments)
    copies: list[Copy] = []
    for number, prefix in enumerate(prefixes):
        for piece in block.pieces:
            parts = stored.pop(prefix + piece.name, None)
            _check_fits(prefix + piece.name, piece, parts)
            start = number * block.size_bytes + piece.offset
            copies += _copies_of(piece, parts or [], memory=start)
    if stored:
        raise ValueError(f"{min(stored)} is not in the model")
    return _joined(copies)


def _check_fits(name: str, piece: Piece, parts: Sequence[meg_store_pb2.NamedBuffer] | None) -> None:
    if parts is None:
        raise ValueError(f"{name} is missing")
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    if shape != piece.shape or parts[0].dtype != piece.dtype:
        raise ValueError(
            f"{name} is {parts[0].dtype} {list(shape)}, the model has "
            f"{piece.dtype} {list(piece.shape)}"
        )


def _copies_of(
    piece: Piece, parts: Sequence[meg_store_pb2.NamedBuffer], *, memory: int
) -> Iterator[Copy]:
    end, first = piece.start + piece.rows, 0
    for part in parts:
        last = first + part.shape[0]
        low, high = max(first, piece.start), min(last, end)
        if low < high:
            yield Copy(
                memory + (low - piece.start) * piece.row_bytes,
                part.offset + (low - first) * piece.row_bytes,
                (high - low) * piece.row_bytes,
            )
        first = last


def _joined(copies: Sequence[Copy]) -> list[Copy]:
    """Joins copies that follow each other on both sides, alignment gaps included."""
    joined: list[Copy] = []
    for copy in copies:
        if joined:
            last = joined[-1]
            gap = copy.memory - last.memory - last.size_bytes
            if 0 <= gap < ALIGNMENT and gap == copy.file - last.file - last.size_bytes:
                joined[-1] = Copy(last.memory, last.file, last.size_bytes + gap + copy.size_bytes)
                continue
        joined.append(copy)
    return joined
