"""Writable mappings that a publisher keeps, so that a reused segment costs no page faults.

The store gives freed files out again under new names; the file behind them is the same. A publisher
that still has it mapped writes at the speed of memory, a fresh mapping at less than half of that
(one fault per page).
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

_Key = tuple[int, int, int]


@dataclass(slots=True)
class Kept:
    """A mapped file and the handle that tells whether it still has a name."""

    map: mmap.mmap
    handle: int

    def close(self) -> None:
        """Unmap, as soon as no view is in use."""
        os.close(self.handle)
        try:
            self.map.close()
        except BufferError:
            # A view outlives its writer; the mapping goes with it.
            return


class KeptMappings:
    """Mappings by file, the least recently used dropped first.

    Args:
        max_bytes: Bound of what is kept mapped.
    """

    def __init__(self, *, max_bytes: int = 4 << 30) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[_Key, Kept] = OrderedDict()
        self._bytes = 0

    def map(self, path: str | Path) -> Kept:
        """A writable mapping of a file: the kept one, or a fresh one."""
        self._drop_unnamed()
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        kept = self._kept.pop(_key(handle), None)
        if kept is not None:
            os.close(handle)
            self._bytes -= len(kept.map)
            return kept
        return Kept(mmap.mmap(handle, 0, access=mmap.ACCESS_WRITE), handle)

    def keep(self, kept: Kept) -> None:
        """Take a mapping back for the next segment of the same file."""
        if os.fstat(kept.handle).st_nlink == 0 or len(kept.map) > self._max_bytes:
            kept.close()
            return
        self._kept[_key(kept.handle)] = kept
        self._bytes += len(kept.map)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def close(self) -> None:
        """Drop all."""
        for key in list(self._kept):
            self._drop(key)

    def _drop_unnamed(self) -> None:
        # A removed file keeps its pages for as long as it is mapped.
        for key, kept in list(self._kept.items()):
            if os.fstat(kept.handle).st_nlink == 0:
                self._drop(key)

    def _drop(self, key: _Key) -> None:
        kept = self._kept.pop(key)
        self._bytes -= len(kept.map)
        kept.close()


def _key(handle: int) -> _Key:
    status = os.fstat(handle)
    return status.st_dev, status.st_ino, status.st_size
