"""Ends what a test process has left running, once that process is gone, however it went.

A test ends what it starts. One whose process is killed in the middle ends nothing, and clusters are
made to outlive the command that starts them. So a test process marks its environment, which all
that it starts inherits, and starts a guardian, which waits for the end of a pipe that only the test
process holds; the kernel ends that in any case. Then the guardian kills what bears the mark.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

MARK = "FLEXMARL_TEST_PROCESS"
PATIENCE_S = 30.0
"""Longest look for what is left: who is killed may have started another one a moment before."""


def guard() -> Callable[[], None]:
    """Starts the guardian of this process; returns what ends it, and what is left, in order."""
    mark = uuid.uuid4().hex
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != MARK},
    )
    os.environ[MARK] = mark

    def end() -> None:
        os.environ.pop(MARK)
        guardian.communicate()

    return end


def end_marked(mark: str) -> None:
    """Kills all processes that were started under a mark, until there are none."""
    end = time.monotonic() + PATIENCE_S
    while (pids := list(_marked(mark))) and time.monotonic() < end:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])
