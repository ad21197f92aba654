"""A child process as its service sees it: a name, a pid, a link, an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flexmarl.runtime.aio import in_thread
from flexmarl.runtime.child_link import LINK_FD_VARIABLE, end_group
from flexmarl.runtime.frames import FrameLink
from flexmarl.runtime.logging import get_logger

_log = get_logger(__name__)


class ChildProcess:
    """One child; the leader of a process group of its own.

    It dies when its service does (the link closes), when the link is closed, and by `kill`.

    Args:
        name: Such as `trainer-worker/0`.
        pid: Process id, also of the group.
        link: Frames to and from the child.
        exited: Future of the exit code; negative: ended by that signal.
    """

    def __init__(
        self, *, name: str, pid: int, link: FrameLink, exited: asyncio.Future[int]
    ) -> None:
        self.name = name
        self.pid = pid
        self.link = link
        self._exited = exited

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self, *, timeout_s: float | None = None) -> int:
        """Wait for the child's end.

        Raises:
            TimeoutError: It still runs after `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._exited)

    def on_exit(self, callback: Callable[[ChildProcess], None]) -> None:
        """Call back in the event loop once the child has ended; soon, when it has already."""
        self._exited.add_done_callback(lambda _: callback(self))

    def terminate(self) -> None:
        """SIGTERM to the child's whole group."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the child's whole group."""
        self._signal(signal.SIGKILL)

    async def stop(self, *, grace_s: float = 5.0) -> int:
        """SIGTERM, then SIGKILL after `grace_s`; returns the exit code."""
        self.terminate()
        try:
            return await self.wait(timeout_s=grace_s)
        except TimeoutError:
            _log.warning("child_killed", child=self.name, pid=self.pid, grace_s=grace_s)
            self.kill()
            return await self.wait(timeout_s=30.0)
        finally:
            self.link.close()

    def _signal(self, number: signal.Signals) -> None:
        # The pid is ours only until the exit code was collected.
        if not self._exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


async def start_python_module(
    module: str,
    args: Sequence[str],
    *,
    name: str,
    env: Mapping[str, str],
    log_file: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> ChildProcess:
    """Start `python -m module` in a fresh interpreter, under the watch of its link."""
    ours, theirs = socket.socketpair()
    try:
        process = await in_thread(
            _popen, module, args, env=env, log_file=log_file, fds=(theirs.fileno(), *pass_fds)
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    exited = _collect_exit(process, name)
    link = await FrameLink.over(ours, name=name)
    return ChildProcess(name=name, pid=process.pid, link=link, exited=exited)


def _popen(
    module: str,
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    log_file: Path | None,
    fds: Sequence[int],
) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as files:
        output = None if log_file is None else files.enter_context(log_file.open("ab"))
        return subprocess.Popen(
            [sys.executable, "-m", "flexmarl.runtime.child_boot", module, *args],
            env={**os.environ, **env, LINK_FD_VARIABLE: str(fds[0])},
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a group of its own, so that all of it can be ended
        )


def _collect_exit(process: subprocess.Popen[bytes], name: str) -> asyncio.Future[int]:
    """Future of the exit code, set by a thread that waits for the process."""
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[int] = loop.create_future()

    def collect() -> None:
        # Seen and not collected: until then the number names this child's group only.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        end_group(process.pid)
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(exited.set_result, code)

    threading.Thread(target=collect, name=f"wait {name}", daemon=True).start()
    return exited
