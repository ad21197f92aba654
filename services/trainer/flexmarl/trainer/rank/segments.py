"""Files of the node's store, read and written at positions.

Nothing is mapped: a fresh mapping costs a fault per page, and writing to a mapped file of a full
tmpfs is a signal that ends the process, where a write is an error that can be answered.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError, ErrorReason

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Element types by safetensors' spelling."""

DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
"""Inverse of `DTYPES`."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class SegmentFile:
    """An open segment file; a piece of it and a flat host tensor of bytes are copied at once."""

    def __init__(self, descriptor: int, segment: rank_pb2.MappedSegment) -> None:
        self._descriptor = descriptor
        self._segment = segment

    def read(self, offset: int, target: torch.Tensor) -> None:
        """Fills `target` (uint8, contiguous, on the host) from the file.

        Raises:
            DomainError: CHECKSUM_MISMATCH when the file ends before.
        """
        view = target.numpy().data
        while view.nbytes:
            count = os.preadv(self._descriptor, [view], offset)
            if not count:
                raise DomainError(
                    ErrorReason.CHECKSUM_MISMATCH,
                    f"segment {self._segment.key} ends before byte {offset + view.nbytes}",
                    {"segment": self._segment.key},
                )
            view, offset = view[count:], offset + count

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Writes `source` (uint8, contiguous, on the host) to the file.

        Raises:
            DomainError: DISK_FULL when there is no room for it on the tier.
        """
        view = source.numpy().data
        while view.nbytes:
            try:
                count = os.pwritev(self._descriptor, [view], offset)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                raise DomainError(
                    ErrorReason.DISK_FULL,
                    f"no room to write {self._segment.kind} into segment {self._segment.key}",
                    {"segment": self._segment.key},
                ) from error
            view, offset = view[count:], offset + count


@contextmanager
def opened(segment: rank_pb2.MappedSegment, *, write: bool) -> Iterator[SegmentFile]:
    """Opens a segment's file for the block.

    Raises:
        DomainError: SEGMENT_NOT_FOUND when the file is gone.
    """
    try:
        descriptor = os.open(segment.path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise DomainError(
            ErrorReason.SEGMENT_NOT_FOUND,
            f"the file of segment {segment.key} is gone",
            {"segment": segment.key},
        ) from error
    try:
        yield SegmentFile(descriptor, segment)
    finally:
        os.close(descriptor)
