"""State segments on this node: map, fill, read.

A segment is a file that the store made and gave the path of. Readers hold a lease while they map
it; the store reuses its pages only afterwards, so views must not outlive the reader. Beside the
lease a reader has a shared lock on the file, and so has who fills one until it is sealed. The
kernel takes it from them however they end: the store need not wait long for one that was killed.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Generic, Self, TypeVar

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import Buffer, content_hash, spec_of
from flexmarl.client.mappings import Kept, KeptMappings
from flexmarl.core.errors import DomainError, ErrorReason

_log = logging.getLogger(__name__)

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

_Seal = Callable[
    [Sequence[pb.NamedBuffer], str, Mapping[str, str]], Awaitable[common_pb2.ObjectRef]
]


class MappedSegment:
    """A mapped segment file: views by name. Close it when no view is in use.

    Args:
        path: File made by the store.
        buffers: Layout.
        writable: Views can be written; the file changes with them.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is shorter than its layout.
    """

    def __init__(
        self, path: str | Path, buffers: Collection[pb.NamedBuffer], *, writable: bool = False
    ) -> None:
        handle = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            _check_length(path, os.fstat(handle).st_size, buffers)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(handle, 0, access=access)
        finally:
            os.close(handle)
        self._whole = memoryview(self._map)
        self.buffers = views(self._whole, buffers)

    def content_hash(self) -> str:
        """Hash of the content, see `flexmarl.client.buffers.content_hash`."""
        return content_hash(self.buffers.values())

    def close(self) -> bool:
        """Unmap.

        Returns:
            False when a view is still in use; the mapping then lives on until that view is gone.
        """
        _release(self._whole, self.buffers)
        try:
            self._map.close()
        except BufferError:
            return False
        return True


def _release(whole: memoryview, buffers: Mapping[str, Buffer]) -> None:
    """Release the views of a segment, but those that somebody uses, such as a tensor."""
    for view in (*(buffer.data for buffer in buffers.values()), whole):
        with suppress(BufferError):
            view.release()


def views(whole: memoryview, buffers: Iterable[pb.NamedBuffer]) -> Mapping[str, Buffer]:
    """Views of a segment's buffers by name."""
    return MappingProxyType(
        {b.name: Buffer(spec_of(b), whole[b.offset : b.offset + b.size_bytes]) for b in buffers}
    )


def _check_length(path: str | Path, size_bytes: int, buffers: Collection[pb.NamedBuffer]) -> None:
    end = max((buffer.offset + buffer.size_bytes for buffer in buffers), default=0)
    if size_bytes < max(end, 1):  # nothing can be mapped of an empty file
        raise ValueError(f"{path} has {size_bytes} bytes, its layout needs {end}")


def hash_file(path: Path, buffers: Sequence[pb.NamedBuffer]) -> str:
    """Content hash of a segment file.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is shorter than its layout.
    """
    mapped = MappedSegment(path, buffers)
    try:
        return mapped.content_hash()
    finally:
        mapped.close()


def _map_whole(view: pb.OpenSegmentResponse, mappings: KeptMappings) -> Kept:
    key, path = view.object.key, view.path
    where = {"segment": key, "path": path}
    try:
        kept = mappings.map(path)
    except OSError as error:
        message = f"segment {key}: {path} cannot be mapped on this node: {error.strerror}"
        raise DomainError(ErrorReason.SEGMENT_NOT_FOUND, message, where) from error
    except ValueError as error:
        message = f"segment {key} is cut short: {path} is empty"
        raise DomainError(ErrorReason.CHECKSUM_MISMATCH, message, where) from error
    try:
        _check_length(path, len(kept.map), view.buffers)
    except ValueError as error:
        mappings.keep(kept)
        message = f"segment {key} is cut short: {error}"
        raise DomainError(ErrorReason.CHECKSUM_MISMATCH, message, where) from error
    return kept


def _lock(kept: Kept, how: int) -> None:
    """Never waits: without its lock a lease only ends earlier, and what is mapped stays."""
    with suppress(OSError):
        fcntl.flock(kept.handle, how | fcntl.LOCK_NB)


class SegmentReader:
    """A sealed segment under a lease; `close`, or the end of `async with`, gives it back.

    Raises:
        DomainError: SEGMENT_NOT_FOUND when its file cannot be opened on this node,
            CHECKSUM_MISMATCH when it is cut short; the lease is the caller's to give back then.
    """

    def __init__(
        self,
        view: pb.OpenSegmentResponse,
        give_back: Callable[[str], Awaitable[None]],
        mappings: KeptMappings,
    ) -> None:
        self.view = view
        self._give_back = give_back
        self._mappings = mappings
        self._kept: Kept | None = _map_whole(view, mappings)
        _lock(self._kept, fcntl.LOCK_SH)
        self._whole = memoryview(self._kept.map)
        self._buffers = views(self._whole, view.buffers)

    @property
    def path(self) -> str:
        """File, for processes that map it themselves under this lease."""
        return self.view.path

    @property
    def object(self) -> common_pb2.ObjectRef:
        """Reference to the segment."""
        return self.view.object

    @property
    def buffers(self) -> Mapping[str, Buffer]:
        """Read-only views by name; valid until `close`."""
        return self._buffers

    @property
    def attributes(self) -> Mapping[str, str]:
        """Facts given at Seal."""
        return self.view.attributes

    def content_hash(self) -> str:
        """Hash of the content, computed now."""
        return content_hash(self._buffers.values())

    async def close(self) -> None:
        """Unmap and give the lease back; kept while a view is in use, so its pages stay."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        _release(self._whole, self._buffers)
        _lock(kept, fcntl.LOCK_UN)  # the handle may be kept for a segment of another name
        if self._mappings.keep(kept):
            await self._give_back(self.view.lease_id)
        else:
            _log.warning("segment %s is still in use: its lease is kept", self.view.object.key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _locked_for(owner: object, path: str) -> Callable[[], object]:
    """Locks a file until what is returned is called, or the owner is gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return lambda: None  # whoever fills the file will say so
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return weakref.finalize(owner, os.close, handle)


class SegmentWriter:
    """An allocated segment that this process, or one of its node, fills; then `seal` it once.

    At the end of `async with` it is sealed, unless `seal` was called in the block; when the block
    raises, it is left unsealed and the store sweeps it.
    """

    def __init__(
        self,
        allocated: pb.AllocateSegmentResponse,
        buffers: Sequence[pb.NamedBuffer],
        seal: _Seal,
        mappings: KeptMappings,
    ) -> None:
        self.path = allocated.path
        self.tier = allocated.tier
        self.reused = allocated.reused
        self.layout = tuple(buffers)
        self.object: common_pb2.ObjectRef | None = None
        self._seal = seal
        self._then: Callable[[], Awaitable[common_pb2.ObjectRef]] | None = None
        self._mappings = mappings
        self._unlock = _locked_for(self, allocated.path)
        self._kept: Kept | None = None
        self._has_ended = False
        self._whole = memoryview(b"")
        self._buffers: Mapping[str, Buffer] = {}

    @property
    def buffers(self) -> Mapping[str, Buffer]:
        """Writable views by name; valid until `seal`.

        Mapped when they are asked for: who has others fill the file needs its path alone.
        """
        if self._kept is None and not self._has_ended:
            self._kept = self._mappings.map(self.path)
            self._kept.populate(0, len(self._kept.map))
            self._whole = memoryview(self._kept.map)
            self._buffers = views(self._whole, self.layout)
        return self._buffers

    def content_hash(self) -> str:
        """Hash of what is written so far; give it to `seal`."""
        return content_hash(self.buffers.values())

    async def seal(
        self, *, checksum: str = "", attributes: Mapping[str, str] = _NOTHING
    ) -> common_pb2.ObjectRef:
        """Publish; without a checksum the store computes it beside.

        Args:
            checksum: Of the content.
            attributes: More facts beside those named when it was allocated.

        Raises:
            FlexMarlError: SEGMENT_NOT_FOUND when another process took the key over.
        """
        self._unmap()
        try:
            self.object = await self._seal(self.layout, checksum, attributes)
        finally:
            self._unlock()
        if self._then is not None:
            self.object = await self._then()
        return self.object

    def then(self, after: Callable[[], Awaitable[common_pb2.ObjectRef]]) -> None:
        """Have something done after the seal; the reference that it returns is the segment's."""
        self._then = after

    def abandon(self) -> None:
        """Give the views up without publishing."""
        self._unmap()
        self._unlock()

    def _unmap(self) -> None:
        self._has_ended = True
        kept, self._kept = self._kept, None
        if kept is None:
            return
        _release(self._whole, self._buffers)
        self._mappings.keep(kept)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abandon()
        elif self.object is None:
            await self.seal()


HeldT = TypeVar("HeldT", bound=SegmentReader | SegmentWriter)


class Held(Generic[HeldT]):
    """`await` it for a segment to be closed or sealed by hand, or use it as `async with`."""

    def __init__(self, made: Coroutine[None, None, HeldT]) -> None:
        self._made = made
        self._held: HeldT | None = None

    def __await__(self) -> Generator[None, None, HeldT]:
        return self._made.__await__()

    async def __aenter__(self) -> HeldT:
        self._held = held = await self
        return held

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._held is not None:
            await self._held.__aexit__(kind, error, traceback)
