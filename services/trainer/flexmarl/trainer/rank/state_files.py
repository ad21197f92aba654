"""State of the bound policy to and from segments."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, Protocol

import torch

from flexmarl.api.meg_store.v1 import meg_store_pb2
from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.trainer.rank.segments import SegmentFile, SegmentFiles
from flexmarl.trainer.rank.transfers import Transfers
from flexmarl.trainer.state_layout import Block, Copy, plan_copies

PIECE_BYTES: Final = 16 << 20
"""Most bytes that are compared, or sent between ranks, at once."""

MAX_PLANS: Final = 32
"""Most plans of copies that are kept: three per policy and number of ranks."""

Rows = Iterator[tuple[int, torch.Tensor]]
"""Flat bytes, each with its place in a segment."""


class Weights(Protocol):
    """Weights that can be published."""

    def full_rows(self, buffers: Mapping[str, meg_store_pb2.NamedBuffer]) -> Rows:
        """Yields rows of full tensors as bytes, with their places in a segment."""
        ...


class StateFiles:
    """Loads and stores blocks of state.

    Args:
        segments: Opens files.
        transfers: Between device and files.
        verify: Read back what was stored and compare checksums: a swap that changed a bit is an
            error then, at the price of about a third of the rate.
    """

    def __init__(self, segments: SegmentFiles, transfers: Transfers, *, verify: bool) -> None:
        self._segments = segments
        self._transfers = transfers
        self._verify = verify

    def load(self, segment: rank_pb2.MappedSegment, block: Block, memory: torch.Tensor) -> None:
        """Fills a rank's memory of one kind of state, whatever number of ranks wrote it.

        Args:
            segment: Sealed segment.
            block: What the rank has.
            memory: All of that kind, flat.

        Raises:
            DomainError: CONTENT_MISMATCH for state of another model, SEGMENT_NOT_FOUND,
                CHECKSUM_MISMATCH.
        """
        copies = _plan(segment, block)
        with self._segments.opened(segment, write=False) as file:
            for copy in copies:
                self._transfers.load(file, copy.file, _cut(memory, copy))

    def pieces(
        self, segment: rank_pb2.MappedSegment, block: Block, *, device: torch.device
    ) -> Iterator[torch.Tensor]:
        """Yields what some rank's memory is filled with, piece by piece; valid until the next one.

        Args:
            segment: Sealed segment.
            block: What that rank has.
            device: Where the pieces are to lie.

        Raises:
            DomainError: As `load`.
        """
        with self._segments.opened(segment, write=False) as file:
            for copy in _in_pieces(_plan(segment, block)):
                piece = torch.empty(copy.size_bytes, dtype=torch.uint8, device=device)
                self._transfers.load(file, copy.file, piece)
                yield piece

    def to_fill(
        self, segment: rank_pb2.MappedSegment, block: Block, memory: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yields the places in a rank's memory that the same `pieces` go to."""
        yield from (_cut(memory, copy) for copy in _in_pieces(_plan(segment, block)))

    def store(self, segment: rank_pb2.MappedSegment, rows: Rows) -> None:
        """Writes rows into a segment: a rank's block (`rows_of`), or its rows of full tensors.

        Raises:
            DomainError: DISK_FULL, SEGMENT_NOT_FOUND, CHECKSUM_MISMATCH.
        """
        with self._segments.opened(segment, write=True) as file:
            for offset, part in rows:
                self._put(file, segment, offset, part)

    def _put(
        self, file: SegmentFile, segment: rank_pb2.MappedSegment, offset: int, rows: torch.Tensor
    ) -> None:
        self._transfers.store(file, offset, rows)
        if self._verify:
            _compare(file, segment, offset, rows)


def rows_of(segment: rank_pb2.MappedSegment, block: Block, memory: torch.Tensor) -> Rows:
    """Yields a rank's memory of one kind of state, with its places in the rank's part of a segment.

    Raises:
        DomainError: CONTENT_MISMATCH.
    """
    yield from ((copy.file, _cut(memory, copy)) for copy in _plan(segment, block))


def weight_rows(segment: rank_pb2.MappedSegment, weights: Weights) -> Rows:
    """Yields a rank's rows of the weights, with their places in a segment of full tensors.

    No rank holds more than its rows: nothing is gathered.
    """
    return weights.full_rows({item.name: item for item in segment.buffers})


def _in_pieces(copies: Sequence[Copy]) -> Iterator[Copy]:
    for copy in copies:
        for start in range(0, copy.size_bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, copy.size_bytes - start)
            yield Copy(copy.memory + start, copy.file + start, length)


def _plan(segment: rank_pb2.MappedSegment, block: Block) -> Sequence[Copy]:
    layout = rank_pb2.MappedSegment()
    layout.CopyFrom(segment)
    for name in ("key", "path"):
        layout.ClearField(name)
    try:
        return _plan_of(block, layout.SerializeToString(deterministic=True))
    except ValueError as error:
        raise DomainError(
            ErrorReason.CONTENT_MISMATCH,
            f"segment {segment.key} is {segment.kind} of another model: {error}",
            {"segment": segment.key},
        ) from error


@lru_cache(maxsize=MAX_PLANS)
def _plan_of(block: Block, layout: bytes) -> tuple[Copy, ...]:
    """Swaps of a policy have one plan: making it anew is a tenth of the time that they take."""
    segment = rank_pb2.MappedSegment.FromString(layout)
    return tuple(plan_copies(segment.kind, block, segment.buffers))


def _cut(memory: torch.Tensor, copy: Copy) -> torch.Tensor:
    return memory[copy.memory : copy.memory + copy.size_bytes]


def _compare(
    file: SegmentFile, segment: rank_pb2.MappedSegment, offset: int, rows: torch.Tensor
) -> None:
    for start in range(0, rows.numel(), PIECE_BYTES):
        source = rows[start : start + PIECE_BYTES].cpu()
        found = torch.empty_like(source)
        file.read(offset + start, found)
        if zlib.crc32(source.numpy().data) != zlib.crc32(found.numpy().data):
            raise DomainError(
                ErrorReason.CHECKSUM_MISMATCH,
                f"segment {segment.key}: bytes from {offset + start} on differ from what was "
                "stored",
                {"segment": segment.key},
            )
