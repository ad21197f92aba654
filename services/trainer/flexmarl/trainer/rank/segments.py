"""Files of the node's store, read and written at positions.

Those of the memory tier stay mapped: the store gives its files out again and again, and a copy
between memory and a mapping that was there before runs at the speed of memory, twice that of
`preadv` and `pwritev`. Their pages are reserved when the store makes them, so that none is missing
when it is written. A file on disk is written by a call, which can answer that there is no room.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import torch

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.client.mappings import KeptMappings
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


MAPPED_FROM_BYTES: Final = 1 << 20
"""Smaller files are not worth a mapping."""


class SegmentFile(Protocol):
    """An open segment file; a piece of it and a flat host tensor of bytes are copied at once."""

    def read(self, offset: int, target: torch.Tensor) -> None:
        """Fills `target` (uint8, contiguous, on the host) from the file.

        Raises:
            DomainError: CHECKSUM_MISMATCH when the file ends before, or its medium fails.
        """

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Writes `source` (uint8, contiguous, on the host) to the file.

        Raises:
            DomainError: DISK_FULL when there is no room for it on the tier.
        """


class SegmentFiles:
    """Opens segment files. Safe to use from several threads.

    Args:
        mappings: Of the memory tier's files, writable.
    """

    def __init__(self, mappings: KeptMappings) -> None:
        self._mappings = mappings

    @contextmanager
    def opened(self, segment: rank_pb2.MappedSegment, *, write: bool) -> Iterator[SegmentFile]:
        """Opens a segment's file for the block.

        Raises:
            DomainError: SEGMENT_NOT_FOUND when it cannot be opened: the file is gone.
        """
        try:
            if segment.in_memory and os.stat(segment.path).st_size >= MAPPED_FROM_BYTES:
                file: _MappedFile | _PositionedFile = _MappedFile(self._mappings, segment)
            else:
                file = _PositionedFile(segment, write=write)
        except OSError as error:
            raise DomainError(
                ErrorReason.SEGMENT_NOT_FOUND,
                f"{segment.kind} in segment {segment.key}: {segment.path}: {error.strerror}",
                {"segment": segment.key, "path": segment.path},
            ) from error
        try:
            yield file
        finally:
            file.close()


class _MappedFile:
    """A file of the memory tier."""

    def __init__(self, mappings: KeptMappings, segment: rank_pb2.MappedSegment) -> None:
        self._mappings = mappings
        self._segment = segment
        self._kept = mappings.map(segment.path)
        # An address, not a view: a view would have to be gone before the mapping is.
        self._start = torch.frombuffer(self._kept.map, dtype=torch.uint8).data_ptr()

    def read(self, offset: int, target: torch.Tensor) -> None:
        """See `SegmentFile`."""
        place = self._place(offset, target.numel())
        ctypes.memmove(target.data_ptr(), place, target.numel())

    def write(self, offset: int, source: torch.Tensor) -> None:
        """See `SegmentFile`."""
        place = self._place(offset, source.numel())
        self._kept.populate(offset, source.numel())
        ctypes.memmove(place, source.data_ptr(), source.numel())

    def close(self) -> None:
        """Keeps the mapping for whoever opens the file next."""
        self._mappings.keep(self._kept)

    def _place(self, offset: int, size_bytes: int) -> int:
        if offset + size_bytes > len(self._kept.map):
            raise _unread(self._segment, f"ends before byte {offset + size_bytes}")
        return self._start + offset


class _PositionedFile:
    """A file on disk, or a small one."""

    def __init__(self, segment: rank_pb2.MappedSegment, *, write: bool) -> None:
        self._segment = segment
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        self._descriptor = os.open(segment.path, flags)

    def read(self, offset: int, target: torch.Tensor) -> None:
        """See `SegmentFile`."""
        view = target.numpy().data
        while view.nbytes:
            try:
                count = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                what = f"cannot be read at byte {offset}: {error.strerror}"
                raise _unread(self._segment, what) from error
            if not count:
                raise _unread(self._segment, f"ends before byte {offset + view.nbytes}")
            view, offset = view[count:], offset + count

    def write(self, offset: int, source: torch.Tensor) -> None:
        """See `SegmentFile`."""
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

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


def _unread(segment: rank_pb2.MappedSegment, what: str) -> DomainError:
    return DomainError(
        ErrorReason.CHECKSUM_MISMATCH,
        f"{segment.kind} in segment {segment.key}: {segment.path} {what}",
        {"segment": segment.key, "path": segment.path},
    )
