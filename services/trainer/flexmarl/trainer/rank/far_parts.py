"""State of ranks on another node than the segments: it goes through ranks that have them.

    ranks 0 .. num_near-1   read and write the files of segments
    every other rank        has one of them for a door: rank r has rank r % num_near

A far rank says what it lacks, and its door reads and sends it; what a far rank has to store it
sends with its place in the file. So exactly the bytes that somebody lacks cross the network, over
the process group (gloo, NCCL), in pieces, and no file but the segment holds them on the way.

All ranks of a group call each method alike. One that fails while another waits for it leaves that
one waiting: the service ends the group then, as it does for any collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import torch
import torch.distributed as dist

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError
from flexmarl.trainer.rank.state_files import PIECE_BYTES, Rows, StateFiles
from flexmarl.trainer.state_layout import Block

_END: Final = -1


class FarParts:
    """The exchange of one bound policy; without far ranks it is files alone.

    Args:
        files: State from and to files.
        group: The policy's group.
        num_near: Ranks on the segments' node; the first ones.
        block_of: What a rank has.
        device: Where state lies.
    """

    def __init__(
        self,
        files: StateFiles,
        *,
        group: dist.ProcessGroup,
        num_near: int,
        block_of: Callable[[int], Block],
        device: torch.device,
    ) -> None:
        self._files = files
        self._group = group
        self._block_of = block_of
        self._device = device
        self._rank = group.rank()
        self._door = self._rank % num_near
        self._wards = tuple(range(self._rank + num_near, group.size(), num_near))
        self._is_far = self._rank >= num_near
        self.has_far_ranks = group.size() > num_near
        if self._is_far:
            self._wards = ()

    def load(
        self,
        segments: Mapping[str, rank_pb2.MappedSegment],
        *,
        lacking: Collection[str],
        memory: Callable[[str], torch.Tensor],
    ) -> None:
        """Fills this rank's memory of the kinds of state that it lacks.

        Args:
            segments: By kind, the same on all ranks.
            lacking: Kinds that this rank lacks.
            memory: All of a kind, flat.

        Raises:
            DomainError: See `StateFiles.load`.
        """
        kinds = sorted(segments)
        if self._is_far:
            asked = torch.tensor([kind in lacking for kind in kinds], dtype=torch.uint8)
            self._send(asked, self._door)
        block = self._block_of(self._rank)
        for kind in kinds:
            if kind not in lacking:
                continue
            if not self._is_far:
                self._files.load(segments[kind], block, memory(kind))
                continue
            for piece in self._files.to_fill(segments[kind], block, memory(kind)):
                self._receive(piece, self._door)
        for ward in self._wards:
            asked = torch.empty(len(kinds), dtype=torch.uint8)
            for kind, wanted in zip(kinds, self._received(asked, ward).tolist(), strict=True):
                if wanted:
                    for piece in self._files.pieces(
                        segments[kind], self._block_of(ward), device=self._device
                    ):
                        self._send(piece, ward)

    def store(self, segment: rank_pb2.MappedSegment, rows: Rows) -> None:
        """Writes this rank's rows into a segment, and those that it is a door for.

        What far ranks send is taken from them even where it cannot be written, so that none waits.

        Raises:
            DomainError: See `StateFiles.store`.
        """
        if self._is_far:
            self._hand_over(rows)
            return
        failure = None
        for incoming in (rows, *(self._from(ward) for ward in self._wards)):
            try:
                self._files.store(segment, incoming)
            except DomainError as error:
                failure = failure or error
                for _ in incoming:
                    pass
        if failure is not None:
            raise failure

    def _hand_over(self, rows: Rows) -> None:
        for offset, whole in rows:
            for start in range(0, whole.numel(), PIECE_BYTES):
                piece = whole[start : start + PIECE_BYTES]
                self._send(torch.tensor([offset + start, piece.numel()]), self._door)
                self._send(piece, self._door)
        self._send(torch.tensor([_END, 0]), self._door)

    def _from(self, ward: int) -> Rows:
        while True:
            place = self._received(torch.empty(2, dtype=torch.int64), ward)
            offset, size_bytes = place.tolist()
            if offset == _END:
                return
            piece = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            self._receive(piece, ward)
            yield offset, piece

    def _send(self, tensor: torch.Tensor, rank: int) -> None:
        self._group.send([tensor.to(self._device)], rank, 0).wait()

    def _receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._group.recv([tensor], rank, 0).wait()

    def _received(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        tensor = like.to(self._device)
        self._receive(tensor, rank)
        return tensor
