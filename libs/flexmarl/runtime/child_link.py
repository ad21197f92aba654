"""The child's end of the link to the service that started it, and the watch over that service.

I15: a child must not outlive its parent, whatever it is busy with. A thread watches the link for
the closing of the parent's end, which the kernel does also after `kill -9`, and exits the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from typing import Final

from flexmarl.runtime.frames import HEADER, MAX_FRAME_BYTES, FrameLink

LINK_FD_VARIABLE: Final = "FLEXMARL_LINK_FD"
"""Environment variable that tells a child the descriptor of its link."""

EXIT_ORPHANED: Final = 86
"""Exit code of a child whose parent's end of the link closed."""

_JOINED_BYTES: Final = 64 << 10
"""Frames up to this size are copied behind their header; a second system call costs more."""

_watched: set[int] = set()


def watch_parent(fd: int) -> None:
    """Exit this process, at once and without clean-up, when the other end of the link closes.

    Idempotent per descriptor. Frames that were not read yet do not delay it.
    """
    if fd in _watched:
        return
    _watched.add(fd)
    threading.Thread(target=_watch, args=(fd,), name="parent-watch", daemon=True).start()


def end_group(pid: int) -> None:
    """End what is left of a child's process group once its leader has ended (I15)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def forget_watches() -> None:
    """For a forked child: the watch threads of the process it was forked from are not in it."""
    _watched.clear()


def _watch(fd: int) -> None:
    poller = select.poll()
    # Only the hang-up: data is not this thread's business. Linux tells half-closed by RDHUP.
    poller.register(fd, getattr(select, "POLLRDHUP", 0))
    poller.poll()
    os._exit(EXIT_ORPHANED)


def link_socket() -> socket.socket:
    """The link's socket, as the parent passed it; watched, and not inherited by grandchildren.

    Raises:
        RuntimeError: This process was not started as a child.
    """
    text = os.environ.get(LINK_FD_VARIABLE)
    if text is None:
        raise RuntimeError(f"{LINK_FD_VARIABLE} is not set: start this through Children.spawn_*")
    fd = int(text)
    os.set_inheritable(fd, False)
    watch_parent(fd)
    return socket.socket(fileno=os.dup(fd))


class ChildLink:
    """Blocking link for children that compute; `send` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._reader = sock.makefile("rb", buffering=1 << 18)

    @classmethod
    def from_environment(cls) -> ChildLink:
        """The link to the process that started this one."""
        return cls(link_socket())

    def recv(self) -> bytes | None:
        """Wait for a frame; None at the end of the link (and the watch exits the process soon).

        Waits for the parent without a deadline: the parent's death ends the process.
        """
        header = self._reader.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (size,) = HEADER.unpack(header)
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"frame of {size} bytes")
        frame = self._reader.read(size)
        return frame if len(frame) == size else None

    def send(self, frame: bytes | bytearray | memoryview) -> None:
        """Send a frame; blocks while the parent does not read, until it does or ends."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"frame of {len(frame)} bytes")
        with self._sending:
            try:
                if len(frame) <= _JOINED_BYTES:  # one call, and the parent wakes up once
                    self._socket.sendall(HEADER.pack(len(frame)) + bytes(frame))
                else:
                    self._socket.sendall(HEADER.pack(len(frame)))
                    self._socket.sendall(frame)
            except (BrokenPipeError, ConnectionResetError):
                os._exit(EXIT_ORPHANED)  # as the watch is about to do


class AsyncChildLink(FrameLink):
    """Asyncio link for children that run an event loop."""

    @classmethod
    async def from_environment(cls) -> AsyncChildLink:
        """The link to the process that started this one."""
        return await cls.over(link_socket(), name="parent")
