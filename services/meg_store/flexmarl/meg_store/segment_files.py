"""The files behind segments: two folders, a pool of touched pages, a bound on the memory tier.

File names are hashes and numbers, never text that came over the wire. Fresh pages are reserved when
a file is made, so a full tmpfs is an error here and not a SIGBUS in whoever fills the segment.
"""

from __future__ import annotations

import errno
import hashlib
import os
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.aio import in_thread

MEMORY = pb.SEGMENT_TIER_MEMORY
DISK = pb.SEGMENT_TIER_DISK
_REUSE_SLACK = 1.25
_COPY_BYTES = 64 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """One file of a segment."""

    path: Path
    tier: pb.SegmentTier.ValueType
    size_bytes: int
    reused: bool = False


class NodeFile:
    """A file in the memory tier's folder: whoever reads its token shares that folder.

    Paths alone do not tell: another node, or container, may have a folder of the same name.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "node"
        self.token = uuid.uuid4().hex
        self.path.write_text(self.token)

    def remove(self) -> None:
        """Remove it."""
        self.path.unlink(missing_ok=True)


class SegmentFiles:
    """Makes, reuses and removes files.

    Args:
        memory_dir: Folder in tmpfs.
        disk_dir: Folder on disk.
        memory_bytes: Bound of the memory tier, its pool included.
        pool_bytes: Bound of the pool.
        check_room: Raises DISK_FULL where the disk has no room for this many bytes.
    """

    def __init__(
        self,
        *,
        memory_dir: Path,
        disk_dir: Path,
        memory_bytes: int,
        pool_bytes: int,
        check_room: Callable[[int], None],
    ) -> None:
        self.folders = {MEMORY: memory_dir, DISK: disk_dir}
        self.memory_bytes = memory_bytes
        self._pool_max_bytes = pool_bytes
        self._check_room = check_room
        self._pool: list[SegmentFile] = []
        self._in_use: dict[Path, int] = {}
        self.used_bytes = {MEMORY: 0, DISK: 0}
        self.pool_bytes = 0
        for folder in self.folders.values():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def adopt(self, known: Collection[Path]) -> None:
        """At start: count the files that records name, remove all others."""
        for tier, folder in self.folders.items():
            for path in sorted(folder.glob("*.seg")):
                if path in known:
                    self._use(path, tier, path.stat().st_size)
                else:
                    path.unlink(missing_ok=True)

    async def make_in_memory(self, key: str, size_bytes: int) -> SegmentFile | None:
        """A file of exactly this size in the memory tier; None while it has no room."""
        pooled = self._take(key, size_bytes)
        return pooled if pooled is not None else await self._make_fresh(key, size_bytes, MEMORY)

    async def make_on_disk(self, key: str, size_bytes: int) -> SegmentFile:
        """A file of exactly this size on disk.

        Raises:
            DomainError: DISK_FULL.
        """
        self._check_room(size_bytes)
        file = await self._make_fresh(key, size_bytes, DISK)
        if file is None:
            raise DomainError(
                ErrorReason.DISK_FULL,
                f"no room for a segment of {size_bytes} bytes on disk",
                {"size_bytes": str(size_bytes)},
            )
        return file

    def free(self, file: SegmentFile, *, reusable: bool) -> None:
        """Give a file up.

        Args:
            file: The file.
            reusable: Nobody can still use what is in it.
        """
        self.used_bytes[file.tier] -= self._in_use.pop(file.path, 0)
        if not reusable or file.tier != MEMORY:
            file.path.unlink(missing_ok=True)
            return
        if file.size_bytes > self._pool_max_bytes or not file.path.exists():
            _empty_and_remove(file.path)
            return
        while self.pool_bytes + file.size_bytes > self._pool_max_bytes:
            self._drop_oldest()
        self._pool.append(file)
        self.pool_bytes += file.size_bytes

    def close(self) -> None:
        """Remove the files that only wait to be reused, and the memory folder if it is empty."""
        while self._pool:
            self._drop_oldest()
        with suppress(OSError):
            self.folders[MEMORY].rmdir()

    def _take(self, key: str, size_bytes: int) -> SegmentFile | None:
        fits = [
            file
            for file in self._pool
            if size_bytes <= file.size_bytes <= size_bytes * _REUSE_SLACK
        ]
        if not fits:
            return None
        file = min(fits, key=lambda f: f.size_bytes)
        self._pool.remove(file)
        self.pool_bytes -= file.size_bytes
        path = self._name(key, MEMORY)
        file.path.rename(path)
        os.truncate(path, size_bytes)
        self._use(path, MEMORY, size_bytes)
        return SegmentFile(path, MEMORY, size_bytes, reused=True)

    async def _make_fresh(
        self, key: str, size_bytes: int, tier: pb.SegmentTier.ValueType
    ) -> SegmentFile | None:
        if tier == MEMORY:
            while self._pool and self._is_over(size_bytes):
                self._drop_oldest()
            if self._is_over(size_bytes):
                return None
        file = await self._reserve(key, size_bytes, tier)
        if file is None and tier == MEMORY and self._pool:
            # The tmpfs is full before our bound: others use it, too.
            while self._pool:
                self._drop_oldest()
            file = await self._reserve(key, size_bytes, tier)
        return file

    async def _reserve(
        self, key: str, size_bytes: int, tier: pb.SegmentTier.ValueType
    ) -> SegmentFile | None:
        path = self._name(key, tier)
        self._use(path, tier, size_bytes)
        try:
            await in_thread(_reserve, path, size_bytes)
        except BaseException as error:
            self.used_bytes[tier] -= self._in_use.pop(path)
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                return None
            raise
        return SegmentFile(path, tier, size_bytes)

    def _use(self, path: Path, tier: pb.SegmentTier.ValueType, size_bytes: int) -> None:
        self._in_use[path] = size_bytes
        self.used_bytes[tier] += size_bytes

    def _is_over(self, more_bytes: int) -> bool:
        return self.used_bytes[MEMORY] + self.pool_bytes + more_bytes > self.memory_bytes

    def _drop_oldest(self) -> None:
        file = self._pool.pop(0)
        self.pool_bytes -= file.size_bytes
        _empty_and_remove(file.path)

    def _name(self, key: str, tier: pb.SegmentTier.ValueType) -> Path:
        digest = hashlib.sha256(key.encode()).hexdigest()[:24]
        return self.folders[tier] / f"{digest}-{uuid.uuid4().hex[:8]}.seg"


def copy_file(source: Path, target: Path, *, durably: bool) -> None:
    """Copy a file's bytes within the kernel, into one that exists and has their size.

    Raises:
        OSError: The disk failed, or the source was cut short.
    """
    with source.open("rb") as reading, target.open("r+b") as writing:
        left = os.fstat(writing.fileno()).st_size
        while left:
            count = os.sendfile(writing.fileno(), reading.fileno(), None, min(left, _COPY_BYTES))
            if not count:
                raise OSError(errno.EIO, f"{source} ends {left} bytes before its copy")
            left -= count
    if durably:
        flush_file(target)


def flush_file(path: Path) -> None:
    """Make a file's bytes and name durable, also those written through a mapping."""
    for name in (path, path.parent):
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _reserve(path: Path, size_bytes: int) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if size_bytes:
            os.posix_fallocate(handle, 0, size_bytes)
    finally:
        os.close(handle)


def _empty_and_remove(path: Path) -> None:
    """Remove a file that nobody uses: its pages go, too, where somebody keeps it mapped."""
    with suppress(FileNotFoundError):
        os.truncate(path, 0)
        path.unlink()
