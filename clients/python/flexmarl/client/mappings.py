"""Mappings of segment files that are kept, so that a file that comes again costs no page faults.

The store gives freed files out again under new names; the file behind them is the same. Who still
has it mapped reads and writes at the speed of memory; a fresh mapping costs a fault per page, and
copies in the kernel (`pread`, `pwrite`) reach half of it. A kept mapping holds no memory of its
own: the store empties a file before it removes it.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_Key = tuple[int, int, int]

_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14 and later: the faults of a range at once, at the price of a copy in the kernel."""

_POPULATE_FROM_BYTES: Final = 1 << 20

_OWN_REFERENCES: Final = 2


@dataclass(slots=True)
class Kept:
    """A mapped file and the handle that tells whether it still has a name."""

    map: mmap.mmap
    handle: int
    is_fresh: bool = True
    """Not mapped before: pages are touched for the first time."""

    def populate(self, offset: int, size_bytes: int) -> None:
        """Make the pages of a range writable without a fault for each; for one about to be filled.

        On a kernel that cannot, they come one by one.
        """
        if not self.is_fresh or size_bytes < _POPULATE_FROM_BYTES:
            return
        start = offset - offset % mmap.PAGESIZE
        try:
            self.map.madvise(_MADV_POPULATE_WRITE, start, offset + size_bytes - start)
        except OSError:
            return

    @property
    def is_in_use(self) -> bool:
        """Whether a view of it is left, or one of a part, or a tensor over one."""
        # Each of those refers to the mapping; a view that is released does not. The two others are
        # this object's and that of the call.
        return sys.getrefcount(self.map) > _OWN_REFERENCES

    def close(self) -> None:
        """Unmap, as soon as no view is in use."""
        os.close(self.handle)
        try:
            self.map.close()
        except BufferError:
            # A view outlives its user; the mapping goes with it.
            return


class KeptMappings:
    """Mappings by file, the least recently used dropped first. Safe to use from several threads.

    Args:
        writable: Map for writing, too.
        max_bytes: Bound of what is kept mapped: address space, and a 512th of it for page tables.
        max_files: Bound of their number: each holds a file open.
    """

    def __init__(
        self, *, writable: bool = True, max_bytes: int = 64 << 30, max_files: int = 64
    ) -> None:
        self._writable = writable
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._kept: OrderedDict[_Key, Kept] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def map(self, path: str | Path) -> Kept:
        """A mapping of a file for one user: the kept one, or a fresh one.

        Raises:
            OSError: There is no such file, or it may not be opened.
            ValueError: The file is empty.
        """
        handle = os.open(path, (os.O_RDWR if self._writable else os.O_RDONLY) | os.O_CLOEXEC)
        with self._lock:
            self._drop_unnamed()
            kept = self._kept.pop(_key(handle), None)
            if kept is not None:
                os.close(handle)
                self._bytes -= len(kept.map)
                return kept
        access = mmap.ACCESS_WRITE if self._writable else mmap.ACCESS_READ
        try:
            return Kept(mmap.mmap(handle, 0, access=access), handle)
        except (OSError, ValueError):
            os.close(handle)
            raise

    def keep(self, kept: Kept) -> bool:
        """Take a mapping back for the next segment of the same file.

        Returns:
            False when a view of it is in use: it is not kept, and lives until that view is gone.
        """
        with self._lock:
            key = _key(kept.handle)
            is_in_use = kept.is_in_use
            has_name = os.fstat(kept.handle).st_nlink > 0
            # Two users at once have a mapping each.
            if is_in_use or not has_name or key in self._kept or len(kept.map) > self._max_bytes:
                kept.close()
                return not is_in_use
            kept.is_fresh = False
            self._kept[key] = kept
            self._bytes += len(kept.map)
            while self._bytes > self._max_bytes or len(self._kept) > self._max_files:
                self._drop(next(iter(self._kept)))
            return True

    def close(self) -> None:
        """Drop all."""
        with self._lock:
            for key in list(self._kept):
                self._drop(key)

    def _drop_unnamed(self) -> None:
        # A file that was removed while somebody used it has its pages for as long as it is mapped.
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
