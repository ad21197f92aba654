"""Progress for a log file or a pipe: one line per version, and signs of life in between.

At the start every new wait is a line. When the last of them is over, and whenever nothing was said
for `QUIET_S`, a line says where the batch stands: what is on the screen last is never stale for
longer than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.cli.progress.report import (
    AGENT_PREFIX,
    TOKENS_PREFIX,
    VersionNumbers,
    numbers_of,
)

QUIET_S: Final = 10.0
"""Longest time without a line while a run goes on."""

_RUNNING = common_pb2.RUN_STATUS_RUNNING
_MAX_WAITS: Final = 3


class PlainView:
    """Writes lines; see `flexmarl.cli.progress.live` for a terminal's view.

    Args:
        write: Takes a line.
        clock: Monotonic seconds.
    """

    def __init__(
        self, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._last_wait = ""
        self._said_s = clock()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing to clean up."""

    def say(self, line: str) -> None:
        """Show a line about the cluster."""
        self._say(line)

    def update(self, message: orchestrator_pb2.WatchProgressResponse) -> None:
        """Show what a message brings."""
        for report in message.reports:
            numbers = numbers_of(report)
            self._say(version_line(numbers, message.progress.num_versions))
            for alarm in numbers.alarms:
                self._say(f"ALARM at version {numbers.version}: {alarm}")
        wait = wait_line(message.progress)
        if wait and wait != self._last_wait:
            self._say(wait)
        elif not message.reports and message.progress.status == _RUNNING:
            over = self._last_wait and not wait
            if over or self._clock() - self._said_s >= QUIET_S:
                self._say(status_line(message.progress))
        self._last_wait = wait

    def _say(self, line: str) -> None:
        self._said_s = self._clock()
        self._write(line)


def version_line(numbers: VersionNumbers, num_versions: int) -> str:
    """Version, rewards, step time and its parts, rates: "version 12/60  team 0.31  ..."."""
    parts = [f"version {numbers.version}/{num_versions}"]
    if numbers.team_reward is not None:
        parts.append(f"team {numbers.team_reward:.3f}")
    parts += [f"{name} {value:.3f}" for name, value in numbers.under(AGENT_PREFIX).items()]
    if numbers.step_s is not None:
        parts.append(f"step {numbers.step_s:.2f} s{_step_parts(numbers)}")
    rates = numbers.under(TOKENS_PREFIX)
    if rates:
        parts.append(
            "tokens/s " + ", ".join(f"{name} {value:.0f}" for name, value in rates.items())
        )
    if numbers.num_groups[1]:
        parts.append(f"groups dropped {numbers.num_groups[1]}")
    if numbers.num_voided:
        parts.append(f"rows void {numbers.num_voided}")
    if numbers.idle:
        parts.append(f"not trained: {', '.join(numbers.idle)}")
    return "  ".join(parts)


def wait_line(progress: orchestrator_pb2.RunProgress) -> str:
    """What a run that makes no samples yet waits for; empty while it goes on."""
    if progress.status != _RUNNING or progress.stage != "starting" or not progress.waits:
        return ""
    return f"waiting for: {'; '.join(progress.waits)}"


def status_line(progress: orchestrator_pb2.RunProgress) -> str:
    """Where the batch stands: "batch 3: rollout, 5 of 32 samples ended, 1 of 4 groups"."""
    line = f"batch {progress.version}: {progress.stage}"
    if progress.num_samples:
        line += (
            f", {progress.num_samples_ended} of {progress.num_samples} samples ended, "
            f"{progress.num_groups_closed} of {progress.num_groups} groups"
        )
    waits = list(progress.waits)
    if waits:
        more = f" (and {len(waits) - _MAX_WAITS} more)" if len(waits) > _MAX_WAITS else ""
        line += f"; waiting for: {'; '.join(waits[:_MAX_WAITS])}{more}"
    return line


def _step_parts(numbers: VersionNumbers) -> str:
    parts = numbers.step_parts
    if not parts:
        return ""
    return " (" + ", ".join(f"{name} {value:.2f}" for name, value in parts.items()) + ")"
