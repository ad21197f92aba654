"""State segments: allocate, fill by the publisher, seal, open with a lease, close.

A sealed segment is immutable. It is freed when nothing that training needs names it any more
(training.py) and no lease holds it. Its pages are used again only if every reader is known to have
let go: leases live in memory, so files of a former process life are removed instead of reused, and
readers that still map them keep their pages.
"""

from __future__ import annotations

import asyncio
import struct
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.meg_store.v1alpha1 import meg_store_pb2 as pb
from flexmarl.client.buffers import check_layout
from flexmarl.client.segments import hash_file
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Database, Draft
from flexmarl.meg_store.objects import check_key
from flexmarl.meg_store.runs import Runs
from flexmarl.meg_store.segment_files import DISK, SegmentFile, SegmentFiles, flush_file

MAX_SEGMENT_BYTES = 1 << 40
_HEAD = struct.Struct(">BqqH")


@dataclass(slots=True)
class Segment:
    """One segment as decisions see it."""

    run_id: str
    file: SegmentFile
    sealed: bool
    created_unix_ns: int
    view: pb.OpenSegmentResponse
    leases: dict[str, float] = field(default_factory=dict)
    referenced: bool = False
    """Something that training saved named it once; otherwise only its age ends it."""
    is_ours: bool = True
    """Made by this process: all its leases are known here."""
    doomed: bool = False
    """Its record is gone; the file goes with the last lease."""

    @property
    def key(self) -> str:
        """Its key."""
        return self.view.object.key

    def encode(self) -> bytes:
        """Stored form."""
        run = self.run_id.encode()
        head = _HEAD.pack(self.sealed, self.created_unix_ns, self.file.size_bytes, len(run))
        return head + run + self.view.SerializeToString()

    @classmethod
    def decode(cls, value: bytes) -> Segment:
        """Inverse of `encode`; the segment is of a former life."""
        sealed, created, size_bytes, run_bytes = _HEAD.unpack_from(value)
        body = _HEAD.size + run_bytes
        view = pb.OpenSegmentResponse.FromString(value[body:])
        return cls(
            run_id=value[_HEAD.size : body].decode(),
            file=SegmentFile(Path(view.path), view.tier, size_bytes),
            sealed=bool(sealed),
            created_unix_ns=created,
            view=view,
            is_ours=False,
        )


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
            segment = Segment.decode(value)
            self._segments[segment.key] = segment
        files.adopt({segment.file.path for segment in self._segments.values()})

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def num_leases(self) -> int:
        """Leases that are out."""
        known = (*self._segments.values(), *self._doomed.values())
        return sum(len(segment.leases) for segment in known)

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

    async def make_file(self, request: pb.AllocateSegmentRequest) -> SegmentFile:
        """The file of a segment that is about to be recorded by `allocate`.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT, CONTENT_MISMATCH, DISK_FULL.
        """
        self._runs.require(request.run_id)
        check_key(request.key)
        if not 0 < request.size_bytes <= MAX_SEGMENT_BYTES:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"segment {request.key!r}: {request.size_bytes} is not a size in bytes",
            )
        self._check_free(request)
        return await self._files.make(request.key, request.size_bytes, request.tier)

    def allocate(
        self, draft: Draft, request: pb.AllocateSegmentRequest, file: SegmentFile
    ) -> pb.AllocateSegmentResponse:
        """Record an unsealed segment; an unsealed one of the same key is replaced.

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
        segment = Segment(request.run_id, file, False, time.time_ns(), view)
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

    async def flush_file(self, key: str) -> None:
        """Make the bytes of a segment of the disk tier durable."""
        segment = self._segments.get(key)
        if segment is not None and segment.file.tier == DISK and segment.file.path.exists():
            await asyncio.to_thread(flush_file, segment.file.path)

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
        draft.put(Table.META, keys.join("segment", request.key), sealed.encode())
        draft.at_commit.append(lambda: self._segments.__setitem__(request.key, sealed))
        if not request.checksum:
            draft.after_ack.append(lambda: self._background(request.key))
        return pb.SealSegmentResponse(object=view.object)

    def open(self, request: pb.OpenSegmentRequest, *, now: float) -> pb.OpenSegmentResponse:
        """Give out a lease on a sealed segment.

        Raises:
            DomainError: SEGMENT_NOT_FOUND, also when its file is gone (the host was restarted).
        """
        segment = self._require(request.key, request.run_id)
        stored = self._database.get(Table.META, keys.join("segment", request.key))
        visible = stored is not None and Segment.decode(stored).sealed
        if not segment.sealed or not visible or not segment.file.path.exists():
            raise _not_found(request.key)
        lease = uuid.uuid4().hex
        segment.leases[lease] = now
        answer = pb.OpenSegmentResponse()
        answer.CopyFrom(segment.view)
        answer.lease_id = lease
        return answer

    def close(self, lease_id: str) -> None:
        """Take a lease back; the last one of a freed segment frees its file."""
        for segment in (*self._segments.values(), *self._doomed.values()):
            if lease_id in segment.leases:
                del segment.leases[lease_id]
                break
        else:
            return
        if segment.doomed and not segment.leases:
            del self._doomed[str(segment.file.path)]
            self._files.free(segment.file, reusable=segment.is_ours)

    def check_sealed(self, refs: Iterable[common_pb2.ObjectRef]) -> None:
        """Check that references name sealed segments whose files are there.

        Raises:
            DomainError: SEGMENT_NOT_FOUND.
        """
        for ref in refs:
            segment = self._segments.get(ref.key)
            if segment is None or not segment.sealed or not segment.file.path.exists():
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
                self._files.free(segment.file, reusable=segment.is_ours)

        draft.at_commit.append(forget)
        draft.after_ack.append(release)

    async def sweep(self, *, orphan_ttl_s: float, lease_max_s: float, now: float) -> int:
        """Free what nobody named within `orphan_ttl_s`; forget leases older than `lease_max_s`.

        Returns:
            Number of segments freed.
        """
        for segment in (*self._segments.values(), *self._doomed.values()):
            for lease, since in list(segment.leases.items()):
                if since < now - lease_max_s:
                    segment.is_ours = False  # its reader may still map it: never reuse the pages
                    self.close(lease)
        oldest_ns = time.time_ns() - int(orphan_ttl_s * 1e9)
        orphans = [
            s
            for s in self._segments.values()
            if not s.referenced and not s.leases and s.created_unix_ns < oldest_ns
        ]
        draft = self._database.begin()
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
            checksum = await asyncio.to_thread(
                hash_file, segment.file.path, list(segment.view.buffers)
            )
        except FileNotFoundError:
            return  # freed meanwhile, or lost with the host; whoever opens it is told
        if self._segments.get(key) is not segment:
            return
        segment.view.object.checksum = checksum
        draft = self._database.begin()
        draft.put(Table.META, keys.join("segment", key), segment.encode())
        await self._database.commit(draft)

    def _check_free(self, request: pb.AllocateSegmentRequest) -> None:
        known = self._segments.get(request.key)
        if known is not None and (known.sealed or known.run_id != request.run_id):
            raise _content_mismatch(request.key)

    def _require(self, key: str, run_id: str) -> Segment:
        segment = self._segments.get(key)
        if segment is None or segment.run_id != run_id:
            raise _not_found(key)
        return segment


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
