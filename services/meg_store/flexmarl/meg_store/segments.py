"""State segments: allocate, fill by the publisher, seal, open with a lease, close.

A sealed segment is immutable. It is freed when nothing that training needs names it any more
(training.py) and no lease holds it. Its pages are used again only if every reader is known to have
let go: leases live in memory, so files of a former process life are removed instead of reused, and
readers that still map them keep their pages.

Who maps a file, to read or to fill it, locks it, too (flexmarl.client.segments). Where nobody has
such a lock any more, whoever had it is gone or has given up, and so the leases end, and what was
never sealed goes.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import check_layout
from flexmarl.client.segments import hash_file
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Database, Draft
from flexmarl.meg_store.objects import check_key
from flexmarl.meg_store.runs import Runs
from flexmarl.meg_store.segment_files import DISK, MEMORY, SegmentFile, SegmentFiles, flush_file
from flexmarl.meg_store.segment_record import Segment
from flexmarl.runtime.aio import in_thread

MAX_SEGMENT_BYTES = 1 << 40

_OWN_LEASE: Final = "store-"
"""How leases begin that the store itself holds for as long as it reads a file."""

_MAPPED_LEASE: Final = "mapped-"
"""How leases begin whose holders map the file themselves, and lock it."""

_LOCKED_WITHIN_S: Final = 60.0
"""Longest time from a lease, or an allocation, to the lock of who asked for it."""


class Segments:
    """All segments of this shard.

    Args:
        database: Keeps the records.
        runs: For their existence.
        files: Makes and removes files.
        shard: Name of this shard.
        background: Starts the checksum of a segment that was sealed without one.
    """

    def __init__(
        self,
        database: Database,
        runs: Runs,
        files: SegmentFiles,
        *,
        shard: str,
        background: Callable[[str], None],
    ) -> None:
        self._database = database
        self._runs = runs
        self._files = files
        self._shard = shard
        self._background = background
        self._segments: dict[str, Segment] = {}
        self._doomed: dict[str, Segment] = {}
        for _, value in database.scan(Table.META, keys.prefix("segment")):
            segment = Segment.decode(value, folders=files.folders)
            self._segments[segment.key] = segment
        files.adopt(
            {file.path for s in self._segments.values() for file in (s.file, s.copy) if file}
        )

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def num_leases(self) -> int:
        """Leases that readers have."""
        known = (*self._segments.values(), *self._doomed.values())
        leases = (lease for segment in known for lease in segment.leases)
        return sum(not lease.startswith(_OWN_LEASE) for lease in leases)

    def of_run(self, run_id: str) -> list[Segment]:
        """Segments of a run, by key."""
        found = (s for s in self._segments.values() if s.run_id == run_id)
        return sorted(found, key=lambda s: s.key)

    def sealed(self) -> list[Segment]:
        """Sealed segments, by key."""
        return sorted((s for s in self._segments.values() if s.sealed), key=lambda s: s.key)

    def without_checksum(self) -> list[str]:
        """Keys of sealed segments whose checksum is still to be computed."""
        return sorted(
            s.key for s in self._segments.values() if s.sealed and not s.view.object.checksum
        )

    def find(self, key: str) -> Segment | None:
        """The segment of a key, sealed or not."""
        return self._segments.get(key)

    def are_known(self, segment_keys: Iterable[str]) -> bool:
        """Whether all of these have records, whatever became of their files."""
        return all(key in self._segments for key in segment_keys)

    def is_whole(self, segment_keys: Iterable[str]) -> bool:
        """Whether all of these are sealed and there, in whatever tier."""
        found = [self._segments.get(key) for key in segment_keys]
        return all(s is not None and s.sealed and s.files for s in found)

    def is_on_disk(self, segment_keys: Iterable[str]) -> bool:
        """Whether all of these would survive the host."""
        found = [self._segments.get(key) for key in segment_keys]
        return all(s is not None and s.is_on_disk for s in found)

    def least_recently_used(self) -> Segment | None:
        """The segment that leaves the memory tier next; None when all are in use."""
        idle = [
            s
            for s in self._segments.values()
            if s.sealed and s.file.tier == MEMORY and not s.leases and s.view.object.checksum
        ]
        return min(idle, key=lambda s: (not s.is_cached, s.used_at, s.key), default=None)

    def check_new(self, request: pb.AllocateSegmentRequest) -> None:
        """Refuse a segment that cannot be allocated.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT, CONTENT_MISMATCH.
        """
        self._runs.require(request.run_id)
        check_key(request.key)
        if not 0 < request.size_bytes <= MAX_SEGMENT_BYTES:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"segment {request.key!r}: {request.size_bytes} is not a size in bytes",
            )
        self._check_free(request)

    def allocate(
        self,
        draft: Draft,
        request: pb.AllocateSegmentRequest,
        file: SegmentFile,
        *,
        mapped: bool = False,
    ) -> pb.AllocateSegmentResponse:
        """Record an unsealed segment over a file; an unsealed one of the same key is replaced.

        Args:
            draft: Written with it.
            request: Which one.
            file: The file.
            mapped: Who asked fills the file itself, and may end without a word.

        Raises:
            DomainError: CONTENT_MISMATCH when the key was sealed meanwhile.
        """
        self._check_free(request)
        view = pb.OpenSegmentResponse(
            path=str(file.path),
            tier=file.tier,
            object=common_pb2.ObjectRef(
                shard=self._shard, key=request.key, size_bytes=request.size_bytes
            ),
        )
        segment = Segment(request.run_id, file, False, time.time_ns(), view, is_mapped=mapped)
        replaced = self._segments.get(request.key)
        draft.put(Table.META, keys.join("segment", request.key), segment.encode())

        def keep() -> None:
            self._segments[request.key] = segment
            if replaced is not None:
                # Its publisher may still write into it: the pages are not used again.
                self._files.free(replaced.file, reusable=False)

        draft.at_commit.append(keep)
        return pb.AllocateSegmentResponse(path=view.path, tier=view.tier, reused=file.reused)

    def discard(self, file: SegmentFile) -> None:
        """Give back a file that `make_file` made and no record names."""
        self._files.free(file, reusable=True)

    async def flush_file(self, key: str) -> bool:
        """Make the bytes of a segment of the disk tier durable; False for any other one."""
        segment = self._segments.get(key)
        if segment is None or segment.file.tier != DISK or not segment.file.path.exists():
            return False
        await asyncio.to_thread(flush_file, segment.file.path)
        return True

    def seal(self, draft: Draft, request: pb.SealSegmentRequest) -> pb.SealSegmentResponse:
        """Make a segment visible; sealing it again with the same layout is answered.

        Raises:
            DomainError: SEGMENT_NOT_FOUND, CONTENT_MISMATCH for another layout than sealed.
            ValueError: The layout does not fit.
        """
        segment = self._require(request.key, request.run_id)
        check_layout(request.buffers, size_bytes=segment.file.size_bytes)
        if segment.sealed:
            if list(segment.view.buffers) != list(request.buffers):
                raise _content_mismatch(request.key)
            return pb.SealSegmentResponse(object=segment.view.object)
        if not segment.file.path.exists():
            raise _not_found(request.key)
        view = pb.OpenSegmentResponse()
        view.CopyFrom(segment.view)
        view.buffers.extend(request.buffers)
        view.object.checksum = request.checksum
        for name, value in request.attributes.items():
            view.attributes[name] = value
        sealed = Segment(segment.run_id, segment.file, True, segment.created_unix_ns, view)
        sealed.is_ours = segment.is_ours
        sealed.used_at = time.monotonic()
        draft.put(Table.META, keys.join("segment", request.key), sealed.encode())
        draft.at_commit.append(lambda: self._segments.__setitem__(request.key, sealed))
        if not request.checksum:
            draft.after_ack.append(lambda: self._background(request.key))
        return pb.SealSegmentResponse(object=view.object)

    def open(
        self, request: pb.OpenSegmentRequest, *, now: float, mapped: bool = False
    ) -> pb.OpenSegmentResponse:
        """Give out a lease on a sealed segment.

        Args:
            request: Which one.
            now: Monotonic seconds.
            mapped: Its holder maps the file itself, and may end without a word.

        Raises:
            DomainError: SEGMENT_NOT_FOUND, also when its file is gone.
        """
        segment = self._require(request.key, request.run_id)
        stored = self._database.get(Table.META, keys.join("segment", request.key))
        visible = stored is not None and Segment.decode(stored).sealed
        if not segment.sealed or not visible:
            raise _not_found(request.key)
        if segment.has_lost_memory:  # somebody else cleaned up, as systemd does with RemoveIPC
            self._files.free(segment.move_to_copy(), reusable=False)
        if not segment.file.path.exists():
            raise _gone(segment)
        lease = f"{_MAPPED_LEASE if mapped else ''}{uuid.uuid4().hex}"
        segment.leases[lease] = segment.used_at = now
        answer = pb.OpenSegmentResponse()
        answer.CopyFrom(segment.view)
        answer.lease_id = lease
        return answer

    def close(self, lease_id: str) -> None:
        """Take a lease back; the last one of a freed segment frees its file."""
        for segment in (*self._segments.values(), *self._doomed.values()):
            if lease_id in segment.leases:
                del segment.leases[lease_id]
                segment.used_at = time.monotonic()
                break
        else:
            return
        if segment.doomed and not segment.leases:
            del self._doomed[str(segment.file.path)]
            self._free_files(segment)

    @contextmanager
    def held(self, segment: Segment) -> Iterator[None]:
        """Keep a segment's file from being freed for the block."""
        lease = f"{_OWN_LEASE}{uuid.uuid4().hex}"
        used_at = segment.used_at
        segment.leases[lease] = time.monotonic()
        try:
            yield
        finally:
            self.close(lease)
            segment.used_at = used_at

    def check_sealed(self, refs: Iterable[common_pb2.ObjectRef]) -> None:
        """Check that references name sealed segments whose files are there.

        Raises:
            DomainError: SEGMENT_NOT_FOUND.
        """
        for ref in refs:
            segment = self._segments.get(ref.key)
            if segment is None or not segment.sealed or not segment.files:
                raise _not_found(ref.key)

    def refer(self, segment_keys: Iterable[str]) -> None:
        """Note that something that training saved names these segments."""
        for key in segment_keys:
            segment = self._segments.get(key)
            if segment is not None:
                segment.referenced = True

    def free(self, draft: Draft, segment: Segment) -> None:
        """Delete a segment's record; its file goes once no lease holds it."""
        draft.delete(Table.META, keys.join("segment", segment.key))

        def forget() -> None:
            self._segments.pop(segment.key, None)
            segment.doomed = True
            self._doomed[str(segment.file.path)] = segment

        def release() -> None:
            if not segment.leases and self._doomed.pop(str(segment.file.path), None) is not None:
                self._free_files(segment)

        draft.at_commit.append(forget)
        draft.after_ack.append(release)

    async def sweep(self, *, orphan_ttl_s: float, lease_max_s: float, now: float) -> int:
        """Free what nobody named within `orphan_ttl_s`; forget leases older than `lease_max_s`.

        Leases of readers that are gone, and what was to be filled by who is, end at once.

        Ages are those that this process has seen, by the monotonic clock: neither a jump of the
        wall clock nor a restart ends a segment that is about to be named.

        Returns:
            Number of segments freed.
        """
        for segment in (*self._segments.values(), *self._doomed.values()):
            left = _left_leases(segment, now=now)
            for lease, since in list(segment.leases.items()):
                if since < now - lease_max_s or lease in left:
                    segment.is_ours = False  # its reader may still map it: never reuse the pages
                    self.close(lease)
        orphans = [
            s
            for s in self._segments.values()
            if not s.referenced
            and not s.leases
            and (s.known_since <= now - orphan_ttl_s or _is_given_up(s, now=now))
        ]
        draft = self._database.begin(essential=True)
        for segment in orphans:
            if not segment.sealed:
                segment.is_ours = False  # its publisher may still write
            self.free(draft, segment)
        if orphans:
            await self._database.commit(draft)
        return len(orphans)

    async def compute_checksum(self, key: str) -> None:
        """Compute and record the checksum of a sealed segment, off the event loop."""
        segment = self._segments.get(key)
        if segment is None or not segment.sealed or segment.view.object.checksum:
            return
        try:
            with self.held(segment):  # a file that is emptied while it is mapped ends this process
                checksum = await in_thread(hash_file, segment.file.path, list(segment.view.buffers))
        except (FileNotFoundError, ValueError):
            return  # lost with the host, or cut short; whoever opens it is told
        if self._segments.get(key) is not segment:
            return
        segment.view.object.checksum = checksum
        draft = self._database.begin(essential=True)
        draft.put(Table.META, keys.join("segment", key), segment.encode())
        await self._database.commit(draft, lazy=True)  # one that is lost is computed at start

    def add_copy(self, draft: Draft, segment: Segment, copy: SegmentFile) -> None:
        """Record a copy on disk beside a segment in memory."""
        segment.copy = copy
        segment.view.disk_path = str(copy.path)
        draft.put(Table.META, keys.join("segment", segment.key), segment.encode())

    def move_down(self, draft: Draft, segment: Segment) -> None:
        """Have a segment live on disk alone; readers of now on get that path."""
        memory = segment.move_to_copy()
        draft.put(Table.META, keys.join("segment", segment.key), segment.encode())
        draft.after_ack.append(lambda: self._files.free(memory, reusable=segment.is_ours))

    def _free_files(self, segment: Segment) -> None:
        self._files.free(segment.file, reusable=segment.is_ours)
        if segment.copy is not None:
            self._files.free(segment.copy, reusable=False)

    def _check_free(self, request: pb.AllocateSegmentRequest) -> None:
        known = self._segments.get(request.key)
        if known is not None and (known.sealed or known.run_id != request.run_id):
            raise _content_mismatch(request.key)

    def _require(self, key: str, run_id: str) -> Segment:
        segment = self._segments.get(key)
        if segment is None or segment.run_id != run_id:
            raise _not_found(key)
        return segment


def _left_leases(segment: Segment, *, now: float) -> list[str]:
    """Leases on a file that nobody has locked; those are left out that were given just now."""
    old = [
        lease
        for lease, since in segment.leases.items()
        if lease.startswith(_MAPPED_LEASE) and since < now - _LOCKED_WITHIN_S
    ]
    return old if old and _is_unlocked(segment.file) else []


def _is_given_up(segment: Segment, *, now: float) -> bool:
    """Whether nobody fills a segment any more that was never sealed."""
    waits = not segment.sealed and segment.is_mapped
    return waits and segment.known_since < now - _LOCKED_WITHIN_S and _is_unlocked(segment.file)


def _is_unlocked(file: SegmentFile) -> bool:
    """Whether no process has a lock on a file; False where that cannot be told."""
    try:
        handle = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _gone(segment: Segment) -> DomainError:
    return DomainError(
        ErrorReason.SEGMENT_NOT_FOUND,
        f"segment {segment.key}: its file {segment.file.path} is gone, and there is no other copy",
        {"key": segment.key, "path": str(segment.file.path)},
    )


def _not_found(key: str) -> DomainError:
    return DomainError(
        ErrorReason.SEGMENT_NOT_FOUND, f"no sealed segment {key!r} here", {"key": key}
    )


def _content_mismatch(key: str) -> DomainError:
    return DomainError(
        ErrorReason.CONTENT_MISMATCH,
        f"segment {key!r} is sealed already, or belongs to another run; choose another key",
        {"key": key},
    )
