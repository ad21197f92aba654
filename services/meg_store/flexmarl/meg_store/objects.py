"""Immutable objects: pieces of at most 1 MiB, one record per key, a count of the rows that refer.

Pieces are written under an upload's own number while they arrive; the record appears, in one write,
when all are there and the checksum fits. What a dead upload left is removed at the next start. An
object that no row refers to lives `orphan_ttl_s`.
"""

from __future__ import annotations

import hashlib
import re
import struct
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, replace

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Database, Draft
from flexmarl.meg_store.paging import patient

MAX_OBJECT_BYTES = 1 << 30
PIECE_BYTES = 1 << 20
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,199}")
_HEAD = struct.Struct(">16sIqq")


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """What is stored about an object."""

    upload: bytes
    num_pieces: int
    created_unix_ns: int
    reference_count: int
    ref: common_pb2.ObjectRef

    def encode(self) -> bytes:
        """Stored form."""
        head = _HEAD.pack(self.upload, self.num_pieces, self.created_unix_ns, self.reference_count)
        return head + self.ref.SerializeToString()

    @classmethod
    def decode(cls, value: bytes) -> ObjectRecord:
        """Inverse of `encode`."""
        upload, num_pieces, created, count = _HEAD.unpack_from(value)
        ref = common_pb2.ObjectRef.FromString(value[_HEAD.size :])
        return cls(upload, num_pieces, created, count, ref)


def check_key(key: str) -> str:
    """Returns a key of an object or segment if it may be one.

    Raises:
        DomainError: INVALID_ARGUMENT.
    """
    if not _KEY.fullmatch(key) or ".." in key:
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            f"key {key!r}: use letters, digits and '_', '.', ':', '-', at most 200, no '..'",
        )
    return key


class Objects:
    """The objects of this shard."""

    def __init__(self, database: Database, *, shard: str) -> None:
        self._database = database
        self._shard = shard
        self._orphan_since: dict[bytes, float] = {}

    async def sweep_uploads(self) -> int:
        """Remove the pieces of uploads that never ended; called at start, before any upload."""
        draft = self._database.begin(essential=True)
        left = [key for key, _ in self._database.scan(Table.META, keys.prefix("upload"))]
        for key in left:
            _delete_pieces(draft, key[-16:])
            draft.delete(Table.META, key)
        if left:
            await self._database.commit(draft)
        return len(left)

    async def sweep_orphans(self, *, ttl_s: float, now: float) -> int:
        """Remove objects that have had no reference for `ttl_s`.

        Time runs from the first sweep that saw an object without references, by the monotonic
        clock: neither a jump of the wall clock nor a restart ends one early.

        Args:
            ttl_s: How long one lives without references.
            now: Monotonic seconds.
        """
        since: dict[bytes, float] = {}
        objects = self._database.scan(Table.META, keys.prefix("object"))
        async for key, value in patient(objects):
            if ObjectRecord.decode(value).reference_count <= 0:
                since[key] = self._orphan_since.get(key, now)
        self._orphan_since = since
        draft = self._database.begin(essential=True)
        removed = 0
        for key in [key for key, seen in since.items() if seen <= now - ttl_s]:
            stored = draft.get(Table.META, key)
            record = None if stored is None else ObjectRecord.decode(stored)
            if record is None or record.reference_count > 0:
                continue  # removed, or referred to, since it was read
            draft.delete(Table.META, key)
            _delete_pieces(draft, record.upload)
            removed += 1
        if removed:
            await self._database.commit(draft)
        return removed

    def find(self, key: str) -> ObjectRecord | None:
        """The record of a key, if there is one."""
        value = self._database.get(Table.META, keys.join("object", key))
        return None if value is None else ObjectRecord.decode(value)

    def refer(self, draft: Draft, key: str, change: int = 1) -> None:
        """Change an object's count in the write of the row that refers to it.

        Raises:
            DomainError: OBJECT_NOT_FOUND.
        """
        value = draft.get(Table.META, keys.join("object", key))
        if value is None:
            raise _not_found(key)
        record = ObjectRecord.decode(value)
        record = replace(record, reference_count=record.reference_count + change)
        draft.put(Table.META, keys.join("object", key), record.encode())

    async def put(
        self, header: pb.PutObjectHeader, chunks: AsyncIterable[bytes]
    ) -> common_pb2.ObjectRef:
        """Store an upload; the same content under the same key again is answered.

        Raises:
            DomainError: INVALID_ARGUMENT for key, size or piece, MESSAGE_TOO_LARGE,
                CHECKSUM_MISMATCH, CONTENT_MISMATCH for a key that holds other content.
        """
        if header.key:
            check_key(header.key)
        if header.size_bytes > MAX_OBJECT_BYTES:
            raise DomainError(
                ErrorReason.MESSAGE_TOO_LARGE,
                f"object of {header.size_bytes} bytes; at most {MAX_OBJECT_BYTES} are stored",
            )
        upload = uuid.uuid4().bytes
        draft = self._database.begin()
        draft.put(Table.META, keys.prefix("upload") + upload, b"")
        await self._database.commit(draft)
        try:
            checksum, num_pieces = await self._store_pieces(upload, header, chunks)
            return await self._publish(upload, header, checksum, num_pieces)
        except BaseException:
            self._database.enqueue(self._drop_upload(upload))
            raise

    async def read(self, key: str, *, offset: int, length: int) -> AsyncIterator[bytes]:
        """Pieces of a range.

        Raises:
            DomainError: OBJECT_NOT_FOUND, INVALID_ARGUMENT for a range beyond the end.
        """
        record = self.require(key)
        size_bytes = record.ref.size_bytes
        end = size_bytes if length == 0 else offset + length
        if offset > size_bytes or end > size_bytes:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"object {key!r} has {size_bytes} bytes; {offset}..{end} is outside",
            )
        while offset < end:
            index, skip = divmod(offset, PIECE_BYTES)
            piece = self._database.get(Table.BLOBS, piece_key(record.upload, index))
            if piece is None:  # removed while it was read
                raise _not_found(key)
            part = piece[skip : skip + end - offset]
            offset += len(part)
            yield part

    def require(self, key: str) -> ObjectRecord:
        """The record of a key.

        Raises:
            DomainError: OBJECT_NOT_FOUND.
        """
        record = self.find(key)
        if record is None:
            raise _not_found(key)
        return record

    async def _store_pieces(
        self, upload: bytes, header: pb.PutObjectHeader, chunks: AsyncIterable[bytes]
    ) -> tuple[str, int]:
        digest = hashlib.sha256()
        buffer = bytearray()
        num_pieces = 0
        received = 0

        async def flush(at_least: int) -> None:
            nonlocal num_pieces
            while len(buffer) >= at_least and buffer:
                draft = self._database.begin()
                draft.put(Table.BLOBS, piece_key(upload, num_pieces), bytes(buffer[:PIECE_BYTES]))
                del buffer[:PIECE_BYTES]
                num_pieces += 1
                await self._database.commit(draft, lazy=True)  # the record's write syncs them

        async for chunk in chunks:
            received += len(chunk)
            if len(chunk) > PIECE_BYTES or received > header.size_bytes:
                raise DomainError(
                    ErrorReason.INVALID_ARGUMENT,
                    f"upload of {header.size_bytes} bytes in chunks of at most {PIECE_BYTES}: "
                    f"got a chunk of {len(chunk)}, {received} in all",
                )
            digest.update(chunk)
            buffer += chunk
            await flush(PIECE_BYTES)
        await flush(0)
        checksum = f"sha256:{digest.hexdigest()}"
        if received != header.size_bytes or header.checksum not in ("", checksum):
            raise DomainError(
                ErrorReason.CHECKSUM_MISMATCH,
                f"upload has {received} bytes of {header.size_bytes}, checksum {checksum}",
                {"checksum": checksum, "expected": header.checksum},
            )
        return checksum, num_pieces

    async def _publish(
        self, upload: bytes, header: pb.PutObjectHeader, checksum: str, num_pieces: int
    ) -> common_pb2.ObjectRef:
        key = header.key or checksum
        if key.startswith("sha256:") and key != checksum:
            raise _content_mismatch(key)
        draft = self._database.begin()
        known = draft.get(Table.META, keys.join("object", key))
        if known is not None:
            ref = ObjectRecord.decode(known).ref
            if ref.checksum != checksum:
                raise _content_mismatch(key)
            await self._database.commit(self._drop_upload(upload))
            return ref
        ref = common_pb2.ObjectRef(
            shard=self._shard, key=key, size_bytes=header.size_bytes, checksum=checksum
        )
        record = ObjectRecord(upload, num_pieces, time.time_ns(), 0, ref)
        draft.put(Table.META, keys.join("object", key), record.encode())
        draft.delete(Table.META, keys.prefix("upload") + upload)
        await self._database.commit(draft)
        return ref

    def _drop_upload(self, upload: bytes) -> Draft:
        draft = self._database.begin(essential=True)
        _delete_pieces(draft, upload)
        draft.delete(Table.META, keys.prefix("upload") + upload)
        return draft


def _delete_pieces(draft: Draft, upload: bytes) -> None:
    draft.delete_range(Table.BLOBS, upload, upload + b"\xff" * 5)


def piece_key(upload: bytes, index: int) -> bytes:
    """Key of one piece of an upload."""
    return upload + index.to_bytes(4, "big")


def _not_found(key: str) -> DomainError:
    return DomainError(ErrorReason.OBJECT_NOT_FOUND, f"no object {key!r} here", {"key": key})


def _content_mismatch(key: str) -> DomainError:
    return DomainError(
        ErrorReason.CONTENT_MISMATCH,
        f"object {key!r} exists with other content, or its key names another checksum",
        {"key": key},
    )
