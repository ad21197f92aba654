"""Ends a worker whose event loop is stuck in user code, and leaves word which sample did it.

A reward function that never returns, or a workflow that sleeps without await, blocks every sample
of its worker. No timeout of the loop can cut it, so a thread watches: it writes a report that the
dispatcher reads, and exits the process. The dispatcher fails the named sample and runs the others
in a new worker, from what is stored of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from flexmarl.core.errors import ErrorReason
from flexmarl.rollout.worker.tasks import SampleTask

EXIT_STUCK: Final = 87
"""Exit code of a worker that its watchdog ended."""

_TICK_S: Final = 0.25


class Watchdog:
    """Watches one event loop.

    Args:
        report: File that names the stuck sample: JSON {sample_id, reason, message}.
        reward_timeout_s: Longest run of one call of the reward function.
        step_timeout_s: Longest time that workflow code may hold the loop.
    """

    def __init__(self, *, report: Path, reward_timeout_s: float, step_timeout_s: float) -> None:
        self._report = report
        self._reward_timeout_s = reward_timeout_s
        self._step_timeout_s = step_timeout_s
        self._beat = time.monotonic()
        self._current: tuple[str, str, float] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watches `loop` until the process ends."""
        self._loop = loop
        self._pulse()
        threading.Thread(target=self._watch, name="loop-watchdog", daemon=True).start()

    @contextmanager
    def running(self, sample_id: str, what: str) -> Iterator[None]:
        """Marks the block as one call of the reward function."""
        self._current = (sample_id, what, time.monotonic())
        try:
            yield
        finally:
            self._current = None

    def _pulse(self) -> None:
        self._beat = time.monotonic()
        assert self._loop is not None
        self._loop.call_later(_TICK_S, self._pulse)

    def _watch(self) -> None:
        while True:
            time.sleep(_TICK_S)
            now = time.monotonic()
            current = self._current
            if current is not None and now - current[2] > self._reward_timeout_s:
                sample_id, what, _ = current
                limit = f"reward_timeout_s = {self._reward_timeout_s:g}"
                self._end(sample_id, f"{what} did not return within {limit}", rewarding=True)
            if current is None and now - self._beat > self._step_timeout_s + _TICK_S:
                self._end(
                    self._stuck_sample(),
                    f"the workflow held its worker for {self._step_timeout_s:g} s without await",
                    rewarding=False,
                )

    def _stuck_sample(self) -> str:
        task = asyncio.current_task(self._loop)
        owner = getattr(task, "owner", None) if isinstance(task, SampleTask) else None
        spec = getattr(owner, "spec", None)
        return "" if spec is None else str(spec.sample_id)

    def _end(self, sample_id: str, message: str, *, rewarding: bool) -> None:
        reason = ErrorReason.REWARD_RAISED if rewarding else ErrorReason.WORKFLOW_RAISED
        text = json.dumps({"sample_id": sample_id, "reason": reason.value, "message": message})
        temporary = self._report.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self._report)
        os._exit(EXIT_STUCK)
