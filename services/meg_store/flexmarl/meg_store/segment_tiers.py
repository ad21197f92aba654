"""Which tier a segment lies in: room in memory, and copies on disk.

    allocate -> memory; when it is full, the least recently used go to disk, or else the new one
    commit   -> every k-th version is copied to disk, beside, the newest one that is due first

A copied segment stays in memory until its room is needed; then its file there is given up and
nothing is moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core.errors import DomainError
from flexmarl.meg_store.database import Database
from flexmarl.meg_store.segment_files import DISK, SegmentFile, SegmentFiles, copy_file
from flexmarl.meg_store.segment_record import Segment
from flexmarl.meg_store.segments import Segments
from flexmarl.runtime.aio import in_thread
from flexmarl.runtime.logging import get_logger

_log = get_logger(__name__)


class SegmentTiers:
    """Moves segments between the tiers.

    Args:
        database: Keeps the records.
        segments: The segments.
        files: Their files.
        durably: Copies on disk are synced before they are recorded.
    """

    def __init__(
        self, database: Database, segments: Segments, files: SegmentFiles, *, durably: bool
    ) -> None:
        self._database = database
        self._segments = segments
        self._files = files
        self._durably = durably
        self._making_room = asyncio.Lock()
        self.num_spilled = 0

    async def make_file(self, request: pb.AllocateSegmentRequest) -> SegmentFile:
        """The file of a segment that is about to be recorded by `Segments.allocate`.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT, CONTENT_MISMATCH, DISK_FULL.
        """
        self._segments.check_new(request)
        key, size_bytes = request.key, request.size_bytes
        if request.tier != DISK:
            file = await self._files.make_in_memory(key, size_bytes)
            if file is None and size_bytes <= self._files.memory_bytes:
                file = await self._make_room(key, size_bytes)
            if file is not None:
                return file
        return await self._files.make_on_disk(key, size_bytes)

    async def copy_down(self, segment: Segment) -> bool:
        """Make a copy on disk beside a segment in memory; False when it was freed meanwhile.

        Raises:
            DomainError: DISK_FULL, QUEUE_FULL.
            OSError: The disk failed.
        """
        if segment.is_on_disk:
            return True
        with self._segments.held(segment):
            copy = await self._files.make_on_disk(segment.key, segment.file.size_bytes)
            try:
                await in_thread(copy_file, segment.file.path, copy.path, durably=self._durably)
                draft = self._database.begin()
            except BaseException:
                self._files.free(copy, reusable=False)
                raise
            is_there = self._segments.find(segment.key) is segment and not segment.is_on_disk
            if not is_there:
                self._files.free(copy, reusable=False)
                return segment.is_on_disk
            self._segments.add_copy(draft, segment, copy)
            await self._database.commit(draft)
        return True

    async def _make_room(self, key: str, size_bytes: int) -> SegmentFile | None:
        async with self._making_room:
            while True:
                file = await self._files.make_in_memory(key, size_bytes)
                if file is not None:
                    return file
                segment = self._segments.least_recently_used()
                if segment is None or not await self._vacate(segment):
                    return None

    async def _vacate(self, segment: Segment) -> bool:
        """Give up a segment's file in memory; False when its content has no other place."""
        if not segment.is_cached:
            try:
                await self.copy_down(segment)
            except (DomainError, OSError) as error:
                _log.warning("segment_not_spilled", segment=segment.key, error=str(error))
                return False
        if self._segments.find(segment.key) is not segment or segment.leases:
            return True  # freed, or in use, meanwhile
        draft = self._database.begin(essential=True)
        if segment.is_cached:
            self._segments.free(draft, segment)
        else:
            self._segments.move_down(draft, segment)
        await self._database.commit(draft)
        self.num_spilled += 1
        return True


class StateCopies:
    """Copies the segments of committed versions to disk, beside everything else.

    One task copies; what it has not begun is replaced by the run's newest version that is due, so
    it never falls behind by more than one.
    """

    def __init__(self, segments: Segments, tiers: SegmentTiers) -> None:
        self._segments = segments
        self._tiers = tiers
        self._due: dict[str, tuple[int, Collection[str]]] = {}
        self._filled = asyncio.Event()

    def want(self, run_id: str, version: int, segment_keys: Collection[str]) -> None:
        """Have a version's segments on disk as soon as possible."""
        self._due[run_id] = (version, segment_keys)
        self._filled.set()

    async def run(self) -> None:
        """Copy what is due. Waits for `want`; ends by cancellation."""
        while True:
            await self._filled.wait()
            run_id = next(iter(self._due))
            version, segment_keys = self._due.pop(run_id)
            if not self._due:
                self._filled.clear()
            try:
                await self._copy(segment_keys)
            except (DomainError, OSError) as error:
                # The next version is tried again; retention keeps what the last copy needs.
                _log.warning("state_not_copied", run=run_id, version=version, error=str(error))

    async def _copy(self, segment_keys: Collection[str]) -> None:
        for key in sorted(segment_keys):
            segment = self._segments.find(key)
            if segment is not None and segment.sealed and segment.files:
                await self._tiers.copy_down(segment)
