"""Runs a command and says how much memory it and all processes below it took at the peak.

Usage: python scripts/peak_memory.py COMMAND ARGUMENT...

The sum is of proportional set sizes: a page that several processes map counts once. Exits with the
command's code; interrupting or ending it interrupts or ends the command.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

INTERVAL_S = 0.5
MAX_SHARE = 0.03
"""Largest share of one core that watching may take: the kernel walks all pages of all processes."""


def tree_bytes(root: psutil.Process) -> int:
    """The proportional set sizes of a process and all below it."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for process in [root, *root.children(recursive=True)]:
            # A process may end between being listed and being read.
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


def own_bytes(process: psutil.Process) -> int:
    """What a process itself takes: neither files that it maps nor the node's shared state."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class PeakMemory:
    """Watches memory from a thread until it is closed.

    Args:
        pid: A process.
        size: What is watched of it.
        interval_s: Seconds between two looks.

    Attributes:
        peak_bytes: Largest size seen.
    """

    def __init__(
        self,
        pid: int,
        *,
        size: Callable[[psutil.Process], int] = tree_bytes,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.peak_bytes = 0
        self._size = size
        self._interval_s = interval_s
        self._root = psutil.Process(pid)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.is_set():
            begun_s = time.thread_time()
            self.peak_bytes = max(self.peak_bytes, self._size(self._root))
            self._closed.wait(max(self._interval_s, (time.thread_time() - begun_s) / MAX_SHARE))


def run(command: Sequence[str]) -> tuple[int, int]:
    """Runs a command to its end.

    Returns:
        Its exit code and the peak in bytes.
    """
    process = subprocess.Popen(command)
    # The terminal sends an interrupt to the command as well, which stops in its own order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    with PeakMemory(process.pid) as memory:
        code = process.wait()
    return code, memory.peak_bytes


def main() -> int:
    """Entry point; returns the exit code."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    code, peak_bytes = run(sys.argv[1:])
    print(f"peak memory of all processes: {peak_bytes / 2**30:.1f} GiB", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
