"""Room on the disk: writes are refused while there is still enough of it to go on.

A write that fails within RocksDB is fatal, and a full disk would make every one fail. So what is
kept free is for what was accepted already: queued writes, flushes, compactions. While less than
that is free, mutations are refused, reads are served, and what gives space back is done. Files of
state and snapshots ask before they are made: one of gigabytes would take all of it at once.
"""

from __future__ import annotations

import os
from pathlib import Path

from flexmarl.core.errors import DomainError, ErrorReason


class DiskRoom:
    """Looks at the disk of a folder.

    Args:
        folder: On the disk; it exists.
        min_free_bytes: Kept free.
    """

    def __init__(self, folder: Path, *, min_free_bytes: int) -> None:
        self._folder = folder
        self._min_free_bytes = min_free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that may be written now."""
        seen = os.statvfs(self._folder)
        return seen.f_bavail * seen.f_frsize

    def check(self, more_bytes: int = 0) -> None:
        """Refuse a write that would need what is kept free; 2 us.

        Args:
            more_bytes: Size of a file that is about to be made; rows are small beside what is kept.

        Raises:
            DomainError: DISK_FULL.
        """
        free_bytes = self.free_bytes
        if free_bytes - more_bytes < self._min_free_bytes:
            wanted = f", {more_bytes >> 20} MiB are asked for" if more_bytes else ""
            raise DomainError(
                ErrorReason.DISK_FULL,
                f"the store's disk has {free_bytes >> 20} MiB left{wanted}, and "
                f"store.min_free_bytes keeps {self._min_free_bytes >> 20} MiB free: make room, "
                "then go on or resume the run",
                {"free_bytes": str(free_bytes)},
            )
