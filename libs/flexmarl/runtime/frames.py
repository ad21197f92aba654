"""Length-prefixed frames over a socket, between a service and its child processes.

A frame is a 4-byte big-endian length and that many bytes. `FrameLink` is the asyncio end of it; the
blocking end is `flexmarl.runtime.child_link.ChildLink`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import Final, Self, cast

from flexmarl.core.errors import DomainError, ErrorReason

HEADER: Final = struct.Struct("!I")
MAX_FRAME_BYTES: Final = 256 << 20
"""Larger frames are refused by the sender and break the link at the receiver."""

_READ_HIGH_BYTES: Final = 8 << 20
_FRAME_OVERHEAD_BYTES: Final = 64  # what an unread frame takes beside its bytes


class FrameLink(asyncio.Protocol):
    """Asyncio end of a link.

    `send` waits while the peer does not read (freed when it does, or when the link closes); the
    iterator waits for a frame (freed by a frame, or by the end of the link, which ends it). Unread
    frames are bounded in bytes: above the bound the socket is not read, which stops the peer.

    Args:
        name: Named in errors.
        send_timeout_s: Longest wait of a `send`.
    """

    def __init__(self, *, name: str, send_timeout_s: float = 60.0) -> None:
        self.name = name
        self._send_timeout_s = send_timeout_s
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()
        self._unread_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._drained = asyncio.Event()
        self._drained.set()
        self._ended = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._reading_paused = False

    @classmethod
    async def over(cls, sock: socket.socket, *, name: str, send_timeout_s: float = 60.0) -> Self:
        """Take a connected socket over."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(
            lambda: cls(name=name, send_timeout_s=send_timeout_s), sock=sock
        )
        return link

    @property
    def closed(self) -> bool:
        """Whether the link has ended; frames that came before can still be read."""
        return self._ended.is_set()

    async def send(self, frame: bytes | bytearray | memoryview) -> None:
        """Send a frame.

        Raises:
            DomainError: CHILD_DIED when the link has ended, DEADLINE_EXCEEDED when the peer does
                not read for `send_timeout_s`, MESSAGE_TOO_LARGE.
        """
        size = len(frame)
        if size > MAX_FRAME_BYTES:
            raise DomainError(ErrorReason.MESSAGE_TOO_LARGE, f"{self.name}: frame of {size} bytes")
        if not self._drained.is_set():
            await self._wait_drained()
        transport = self._transport
        if transport is None or self._ended.is_set() or transport.is_closing():
            raise DomainError(ErrorReason.CHILD_DIED, f"{self.name}: the link is closed")
        transport.writelines((HEADER.pack(size), frame))

    async def recv(self) -> bytes | None:
        """The next frame, or None at the end of the link."""
        while not self._frames:
            if self._ended.is_set():
                return None
            if self._reader is not None:
                raise RuntimeError(f"{self.name}: two readers of one link")
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        frame = self._frames.popleft()
        self._unread_bytes -= len(frame) + _FRAME_OVERHEAD_BYTES
        if self._reading_paused and self._unread_bytes < _READ_HIGH_BYTES // 2:
            self._reading_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        return frame

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        frame = await self.recv()
        if frame is None:
            raise StopAsyncIteration
        return frame

    def close(self) -> None:
        """Close the link; a child at the other end exits."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's callback."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Asyncio's callback: cut what came into frames."""
        buffer = self._buffer
        buffer += data
        start, end = 0, len(buffer)
        while end - start >= HEADER.size:
            (size,) = HEADER.unpack_from(buffer, start)
            if size > MAX_FRAME_BYTES:
                self._abort()
                return
            stop = start + HEADER.size + size
            if stop > end:
                break
            self._frames.append(bytes(memoryview(buffer)[start + HEADER.size : stop]))
            self._unread_bytes += size + _FRAME_OVERHEAD_BYTES
            start = stop
        if start:
            del buffer[:start]
            self._wake()
        if self._unread_bytes > _READ_HIGH_BYTES and not self._reading_paused:
            self._reading_paused = True
            if self._transport is not None:
                self._transport.pause_reading()

    def pause_writing(self) -> None:
        """Asyncio's callback."""
        self._drained.clear()

    def resume_writing(self) -> None:
        """Asyncio's callback."""
        self._drained.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's callback: whoever waits is freed."""
        self._ended.set()
        self._drained.set()
        self._wake()

    async def _wait_drained(self) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._drained.wait()
        except TimeoutError:
            raise DomainError(
                ErrorReason.DEADLINE_EXCEEDED,
                f"{self.name}: the peer has not read for {self._send_timeout_s:g} s",
            ) from None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
