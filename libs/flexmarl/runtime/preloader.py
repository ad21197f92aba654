"""The service's side of the zygote: asks for forked children and hands out their exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.child_process import ChildProcess, start_python_module
from flexmarl.runtime.frames import HEADER, FrameLink
from flexmarl.runtime.logging import get_logger

EXIT_UNKNOWN = -int(signal.SIGKILL)
"""Exit code given to children whose zygote died with what it knew; they are killed, too."""

_Forked = tuple[int, "asyncio.Future[int]"]

_log = get_logger(__name__)


class Preloader:
    """One zygote; started on first use, and again when it died, or hung and was ended for that.

    `spawn` waits for the zygote to fork (freed by its reply, at latest after `timeout_s`): the
    first one waits until the modules are imported.

    Args:
        modules: Imported once, before any fork.
        on_start: Told of each zygote process, to record it.
        env: Environment of the zygote, on top of the service's.
        timeout_s: Longest wait for a fork.
    """

    def __init__(
        self,
        *,
        modules: Sequence[str],
        on_start: Callable[[ChildProcess], None],
        env: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self._modules = tuple(modules)
        self._on_start = on_start
        self._env = dict(env or {})
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._zygote: ChildProcess | None = None
        self._requests: socket.socket | None = None
        self._events: asyncio.Task[None] | None = None
        self._replies: dict[int, asyncio.Future[_Forked]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._next_request = 0
        self._has_forked = False

    @property
    def pids(self) -> frozenset[int]:
        """Pid of the running zygote, if any."""
        return frozenset() if self._zygote is None else frozenset((self._zygote.pid,))

    async def start(self) -> None:
        """Start the zygote if none runs; returns before its imports are done."""
        async with self._lock:
            await self._ensure()

    async def spawn(
        self,
        target: str,
        args: Any,  # noqa: ANN401 - any JSON value
        *,
        name: str,
        env: Mapping[str, str],
        log_file: Path | None,
    ) -> ChildProcess:
        """Fork a child that runs `module:function` with `args`.

        Raises:
            DomainError: CHILD_DIED when the zygote died, DEADLINE_EXCEEDED.
        """
        ours, theirs = socket.socketpair()
        try:
            async with self._lock:
                pid, exited = await self._fork(
                    theirs,
                    {
                        "target": target,
                        "args": args,
                        "env": dict(env),
                        "log_file": None if log_file is None else str(log_file),
                    },
                    name=name,
                )
        except BaseException:
            ours.close()  # a child that comes into being all the same finds its link closed
            raise
        finally:
            theirs.close()
        link = await FrameLink.over(ours, name=name)
        return ChildProcess(name=name, pid=pid, link=link, exited=exited)

    async def close(self) -> None:
        """End the zygote; children that still run are without an exit code and are killed."""
        async with self._lock:
            if self._zygote is not None:
                await self._zygote.stop(grace_s=2.0)
            if self._events is not None:
                await self._events
            if self._requests is not None:
                self._requests.close()

    async def _fork(self, theirs: socket.socket, request: dict[str, Any], *, name: str) -> _Forked:
        requests = await self._ensure()
        number = self._next_request = self._next_request + 1
        payload = json.dumps({**request, "request": number}).encode()
        reply: asyncio.Future[_Forked] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.to_thread(_send, requests, payload, theirs.fileno())
                return await reply
        except TimeoutError:
            await self._end_hung()
            raise DomainError(
                ErrorReason.DEADLINE_EXCEEDED,
                f"{name}: not forked within {self._timeout_s:g} s (importing {self._modules})",
            ) from None
        except OSError:
            raise self._died(name) from None
        finally:
            self._replies.pop(number, None)

    async def _end_hung(self) -> None:
        """Ends a zygote that forked before, and so has its imports behind it: it hangs for good."""
        if self._has_forked and self._zygote is not None and self._events is not None:
            _log.warning("zygote_hung", pid=self._zygote.pid, timeout_s=self._timeout_s)
            self._zygote.kill()
            with contextlib.suppress(TimeoutError):
                await self._zygote.wait(timeout_s=30.0)
            await asyncio.wait([self._events], timeout=30.0)

    async def _ensure(self) -> socket.socket:
        if self._zygote is not None and self._requests is not None:
            if self._zygote.exit_code is None and not self._zygote.link.closed:
                return self._requests
            self._requests.close()
        ours, theirs = socket.socketpair()
        try:
            zygote = await start_python_module(
                "flexmarl.runtime.zygote",
                ["--requests-fd", str(theirs.fileno()), *self._modules],
                name="zygote",
                env=self._env,
                pass_fds=(theirs.fileno(),),
            )
        finally:
            theirs.close()
        self._zygote, self._requests, self._has_forked = zygote, ours, False
        self._on_start(zygote)
        self._events = asyncio.create_task(self._follow(zygote), name="zygote events")
        return ours

    async def _follow(self, zygote: ChildProcess) -> None:
        """Waits for the zygote's messages; freed by its end, which ends all its children."""
        async for frame in zygote.link:
            message = json.loads(frame)
            if "exited" in message:
                exited = self._exits.pop(message["exited"], None)
                if exited is not None and not exited.done():
                    exited.set_result(message["code"])
                continue
            self._has_forked = True
            exited = self._exits[message["pid"]] = asyncio.get_running_loop().create_future()
            reply = self._replies.get(message["request"])
            if reply is not None and not reply.done():
                reply.set_result((message["pid"], exited))
        self._bury()

    def _bury(self) -> None:
        for pid, exited in self._exits.items():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if not exited.done():
                exited.set_result(EXIT_UNKNOWN)
        self._exits.clear()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(self._died("a child"))

    def _died(self, name: str) -> DomainError:
        return DomainError(
            ErrorReason.CHILD_DIED,
            f"{name}: the process that imports {', '.join(self._modules)} died",
        )


def _send(sock: socket.socket, payload: bytes, fd: int) -> None:
    data = HEADER.pack(len(payload)) + payload
    sent = socket.send_fds(sock, [data], [fd])
    sock.sendall(data[sent:])
