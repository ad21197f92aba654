"""Ends a worker that user code has made useless, and leaves word which sample did it.

A workflow that sleeps without await blocks every sample of its worker, and one that leaks takes the
machine's memory. No timeout of the loop can cut either, so a thread watches: it writes a report
that the dispatcher reads, and exits the process. The dispatcher fails the named sample and runs the
others in a new worker, from what is stored of them.

Code that holds the interpreter's lock (a regular expression that never ends) stops that thread,
too. For it there is a thread of C, which needs no lock: it writes down where every thread is, and
exits. It knows no samples, so a sample is blamed once it is alone in its worker.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Final

from flexmarl.core.errors import ErrorReason
from flexmarl.rollout.worker.memory import resident_bytes
from flexmarl.rollout.worker.tasks import SampleTask

EXIT_STUCK: Final = 87
"""Exit code of a worker that its watchdog ended."""

_TICK_S: Final = 0.25

_LOCK_GRACE_S: Final = 2.0
"""How much longer the thread without the lock waits than the one that can name the sample."""

_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


def stack_file(report: Path) -> Path:
    """Where a worker's threads are written down, beside its report."""
    return report.with_suffix(".stack")


def held_at(stack: str, folder: str) -> str:
    """The place in the user's package that a written stack shows; empty when it shows none."""
    for path, line, name in _FRAME.findall(stack):
        if path.startswith(folder):
            return f"{os.path.relpath(path, folder)}:{line} in {name}"
    return ""


class Watchdog:
    """Watches one event loop and the memory of its process.

    Args:
        report: File that names the guilty sample: JSON {sample_id, reason, message}. The id is
            empty when no sample can be blamed: then all go on in a new worker.
        step_timeout_s: Longest time that user code may hold the loop.
        memory_bytes: Most resident memory of the process.
    """

    def __init__(self, *, report: Path, step_timeout_s: float, memory_bytes: int) -> None:
        self._report = report
        self._step_timeout_s = step_timeout_s
        self._memory_bytes = memory_bytes
        self._beat = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stack = stack_file(report).open("w")

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watches `loop` until the process ends."""
        self._loop = loop
        self._pulse()
        threading.Thread(target=self._watch, name="loop-watchdog", daemon=True).start()

    def end(self, sample_id: str, message: str, *, reason: ErrorReason) -> None:
        """Leaves word and ends the process."""
        text = json.dumps({"sample_id": sample_id, "reason": reason.value, "message": message})
        temporary = self._report.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self._report)
        os._exit(EXIT_STUCK)

    def _pulse(self) -> None:
        self._beat = time.monotonic()
        faulthandler.dump_traceback_later(
            self._step_timeout_s + _LOCK_GRACE_S, exit=True, file=self._stack
        )
        assert self._loop is not None
        self._loop.call_later(_TICK_S, self._pulse)

    def _watch(self) -> None:
        while True:
            time.sleep(_TICK_S)
            self._check_time(time.monotonic())
            self._check_memory()

    def _check_time(self, now: float) -> None:
        if now - self._beat > self._step_timeout_s + _TICK_S:
            self.end(
                self._stuck_sample(),
                "the workflow held its worker without await for longer than "
                f"step_timeout_s = {self._step_timeout_s:g}",
                reason=ErrorReason.WORKFLOW_RAISED,
            )

    def _check_memory(self) -> None:
        used = resident_bytes()
        if used <= self._memory_bytes:
            return
        mib = self._memory_bytes >> 20
        self.end(
            # Whoever holds the loop right now has done it; a slow leak is nobody's in particular.
            self._stuck_sample(),
            f"its worker used {used >> 20} MiB, more than workflow.worker_memory_mib = {mib}",
            reason=ErrorReason.WORKFLOW_RAISED,
        )

    def _stuck_sample(self) -> str:
        task = asyncio.current_task(self._loop)
        owner = getattr(task, "owner", None) if isinstance(task, SampleTask) else None
        spec = getattr(owner, "spec", None)
        return "" if spec is None else str(spec.sample_id)
