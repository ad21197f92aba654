"""Progress for a log file or a pipe: one line per version, and one for a new wait at the start."""

from __future__ import annotations

from collections.abc import Callable

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.orchestrator.v1alpha1 import orchestrator_pb2
from flexmarl.cli.progress.report import (
    AGENT_PREFIX,
    TOKENS_PREFIX,
    VersionNumbers,
    numbers_of,
)

_RUNNING = common_pb2.RUN_STATUS_RUNNING


class PlainView:
    """Writes lines; see `flexmarl.cli.progress.live` for a terminal's view.

    Args:
        write: Takes a line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._last_wait = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing to clean up."""

    def say(self, line: str) -> None:
        """Show a line about the cluster."""
        self._write(line)

    def update(self, message: orchestrator_pb2.WatchProgressResponse) -> None:
        """Show what a message brings."""
        for report in message.reports:
            self._write(version_line(numbers_of(report), message.progress.num_versions))
        wait = wait_line(message.progress)
        if wait and wait != self._last_wait:
            self._write(wait)
        if wait or message.reports:
            self._last_wait = wait


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
    voided = sum(numbers.voided.values())
    if voided:
        parts.append(f"rows void {voided}")
    return "  ".join(parts)


def wait_line(progress: orchestrator_pb2.RunProgress) -> str:
    """What a run that makes no samples yet waits for; empty while it goes on."""
    if progress.status != _RUNNING or progress.stage != "starting" or not progress.waits:
        return ""
    return f"waiting for: {'; '.join(progress.waits)}"


def _step_parts(numbers: VersionNumbers) -> str:
    parts = numbers.step_parts
    if not parts:
        return ""
    return " (" + ", ".join(f"{name} {value:.2f}" for name, value in parts.items()) + ")"
