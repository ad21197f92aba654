"""Segments between nodes: one store streams, the other keeps a copy under the same key.

    reader's store --ReadSegment--> owner's store: layout, then the file's bytes, under a lease
    reader's store: allocate -> write pieces -> check the hash -> seal, marked as fetched

A copy is not referred to by anything: it goes `orphan_ttl_s` after it was made, or as the first one
when the memory tier is full.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.segments import hash_file
from flexmarl.client.store import StoreClient
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.database import Database
from flexmarl.meg_store.segment_record import FETCHED_FROM
from flexmarl.meg_store.segment_tiers import SegmentTiers
from flexmarl.meg_store.segments import Segments
from flexmarl.runtime.aio import in_thread

PIECE_BYTES: Final = 1 << 20


async def read_pieces(path: Path, size_bytes: int) -> AsyncIterator[bytes]:
    """The bytes of a file, in order."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for offset in range(0, size_bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, size_bytes - offset)
            yield await in_thread(os.pread, handle, length, offset)
    finally:
        os.close(handle)


class SegmentFetches:
    """Brings segments of other stores here; one transfer per key at a time."""

    def __init__(self, database: Database, segments: Segments, tiers: SegmentTiers) -> None:
        self._database = database
        self._segments = segments
        self._tiers = tiers
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        """Lock of each key, and how many calls hold it or wait for it."""

    async def fetch(self, request: pb.FetchSegmentRequest) -> pb.FetchSegmentResponse:
        """Copy a segment of another store; one that is here is answered.

        Raises:
            DomainError: RUN_NOT_FOUND, SEGMENT_NOT_FOUND, CONTENT_MISMATCH, CHECKSUM_MISMATCH,
                DISK_FULL, UNAVAILABLE naming the source.
        """
        async with self._alone(request.key):
            known = self._segments.find(request.key)
            if known is not None and known.sealed and known.files:
                return pb.FetchSegmentResponse(object=known.view.object)
            copied = await self._copy(request)
            return pb.FetchSegmentResponse(object=copied, streamed=True)

    @asynccontextmanager
    async def _alone(self, key: str) -> AsyncIterator[None]:
        """One transfer of a key at a time; who waits is bounded by the deadline of its call.

        The lock lives as long as any call wants it: two locks of one key would let two transfers
        seal each other's half of a file.
        """
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(key)
            if users > 1:
                self._locks[key] = (lock, users - 1)

    async def _copy(self, request: pb.FetchSegmentRequest) -> common_pb2.ObjectRef:
        source = request.source
        async with (
            StoreClient.connect(source.address, shard=source.name) as store,
            aclosing(store.read_segment(request.run_id, request.key)) as messages,
        ):
            first = await anext(messages)
            assert isinstance(first, pb.OpenSegmentResponse)
            path = await self._allocate(request, first.object.size_bytes)
            await _write(path, messages)
        checksum = await in_thread(hash_file, path, list(first.buffers))
        if first.object.checksum not in ("", checksum):
            raise DomainError(
                ErrorReason.CHECKSUM_MISMATCH,
                f"segment {request.key!r} of store shard {source.name!r} arrived with another "
                "content than it was sealed with",
                {"key": request.key, "expected": first.object.checksum, "checksum": checksum},
            )
        return await self._seal(request, first, checksum)

    async def _allocate(self, request: pb.FetchSegmentRequest, size_bytes: int) -> Path:
        allocation = pb.AllocateSegmentRequest(
            run_id=request.run_id, key=request.key, size_bytes=size_bytes
        )
        file = await self._tiers.make_file(allocation)
        try:
            draft = self._database.begin()
            self._segments.allocate(draft, allocation, file)
        except BaseException:
            self._segments.discard(file)
            raise
        await self._database.commit(draft)
        return file.path

    async def _seal(
        self, request: pb.FetchSegmentRequest, opened: pb.OpenSegmentResponse, checksum: str
    ) -> common_pb2.ObjectRef:
        await self._segments.flush_file(request.key)
        sealing = pb.SealSegmentRequest(
            run_id=request.run_id,
            key=request.key,
            buffers=opened.buffers,
            checksum=checksum,
            attributes={**opened.attributes, FETCHED_FROM: request.source.name},
        )
        draft = self._database.begin()
        response = self._segments.seal(draft, sealing)
        await self._database.commit(draft)
        return response.object


async def _write(path: Path, pieces: AsyncIterator[pb.OpenSegmentResponse | bytes]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        offset = 0
        async for piece in pieces:
            assert isinstance(piece, bytes)
            await in_thread(os.pwrite, handle, piece, offset)
            offset += len(piece)
    finally:
        os.close(handle)
