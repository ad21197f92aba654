"""Progress for a terminal: one screen that is drawn anew twice a second."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.api.rollout.v1 import engine_pb2
from flexmarl.cli.progress.report import (
    AGENT_PREFIX,
    TOKENS_PREFIX,
    UTILISATION_PREFIX,
    VersionNumbers,
    numbers_of,
)

HISTORY = 40
"""Versions that the curves show."""

_BARS = "▁▂▃▄▅▆▇█"
_MAX_WAITS = 6
_STATES = {
    engine_pb2.INSTANCE_STATE_STARTING: "starting",
    engine_pb2.INSTANCE_STATE_EMPTY: "empty",
    engine_pb2.INSTANCE_STATE_LOADING: "loading",
    engine_pb2.INSTANCE_STATE_SERVING: "serving",
    engine_pb2.INSTANCE_STATE_DEAD: "dead",
}


class LiveView:
    """Draws the run.

    Args:
        console: Terminal to draw on.
        timed: Whether the time since now is shown: it is the run's, for who has just started it.
    """

    def __init__(self, console: Console, *, timed: bool = True) -> None:
        self._console = console
        self._timed = timed
        self._history: list[VersionNumbers] = []
        self._progress = orchestrator_pb2.RunProgress(stage="starting")
        self._started_s = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        self._draw()
        return self

    def __exit__(self, *error: object) -> None:
        self._draw()
        self.close()

    def close(self) -> None:
        """Stop drawing and show the cursor again."""
        self._live.stop()

    def say(self, line: str) -> None:
        """Show a line about the cluster, above the screen."""
        self._console.print(line, markup=False, highlight=False)

    def update(self, message: orchestrator_pb2.WatchProgressResponse) -> None:
        """Take a message in and draw."""
        self._history += [numbers_of(report) for report in message.reports]
        self._progress = message.progress
        self._draw()

    def _draw(self) -> None:
        elapsed_s = time.monotonic() - self._started_s if self._timed else None
        self._live.update(render(self._progress, self._history, elapsed_s=elapsed_s))


def render(
    progress: orchestrator_pb2.RunProgress,
    history: list[VersionNumbers],
    *,
    elapsed_s: float | None = None,
) -> RenderableType:
    """The screen: heading, rewards, policies, slots, step, waits; the longest wait first."""
    parts: list[RenderableType] = [_heading(progress, history, elapsed_s)]
    if history:
        parts += [_rewards(history), _step(history[-1])]
        if history[-1].idle:
            idle = ", ".join(history[-1].idle)
            parts.append(Text(f"not trained at version {history[-1].version}: {idle}", style="red"))
        parts += [Text(f"ALARM: {alarm}", style="bold red") for alarm in history[-1].alarms]
    parts += [_policies(progress), _slots(progress)]
    parts += [Text(line, style="yellow") for line in _waits(progress)]
    return Group(*parts)


def instance_state(state: engine_pb2.InstanceState.ValueType) -> str:
    """What an instance does, in a word."""
    return _STATES.get(state, "unknown")


def _waits(progress: orchestrator_pb2.RunProgress) -> list[str]:
    """Waits that are explained come with their length, the others by name alone."""
    explained = {reason.what: reason.waited_ms / 1e3 for reason in progress.reasons}
    lines = [f"waits for {what} ({waited_s:.1f} s)" for what, waited_s in explained.items()]
    lines += [f"waits for {what}" for what in progress.waits if what not in explained]
    more = len(lines) - _MAX_WAITS
    return lines[:_MAX_WAITS] + ([f"and {more} more: flexmarl why"] if more > 0 else [])


def _heading(
    progress: orchestrator_pb2.RunProgress,
    history: list[VersionNumbers],
    elapsed_s: float | None,
) -> Text:
    ended = sum(item.metrics.get("num_samples", 0.0) for item in history)
    seen = round(ended) + (progress.num_samples_ended if progress.stage == "rollout" else 0)
    return Text.assemble(
        (progress.run_id, "bold"),
        f"  version {progress.version}/{progress.num_versions}  {progress.stage}",
        f"  groups {progress.num_groups_closed}/{progress.num_groups}",
        f"  samples {progress.num_samples_ended}/{progress.num_samples} ({seen} seen)",
        "" if elapsed_s is None else f"  {elapsed_s:.0f} s",
    )


def _rewards(history: list[VersionNumbers]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("reward", "now", "best", ""):
        table.add_column(name, justify="left" if name in ("reward", "") else "right")
    names = [("team", "team_reward")]
    names += [(name, AGENT_PREFIX + name) for name in history[-1].under(AGENT_PREFIX)]
    for label, key in names:
        values = [item.metrics[key] for item in history if key in item.metrics]
        if values:
            table.add_row(label, f"{values[-1]:.3f}", f"{max(values):.3f}", _curve(values))
    return table


def _curve(values: list[float]) -> str:
    """A line of bars for the newest values, scaled to their own range."""
    shown = values[-HISTORY:]
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def _step(last: VersionNumbers) -> Text:
    text = Text("step ")
    text.append(f"{last.step_s or 0.0:.2f} s", style="bold")
    for name, value in last.step_parts.items():
        text.append(f"  {name} {value:.2f}")
    for name, value in last.under(TOKENS_PREFIX).items():
        text.append(f"  {name} {value:.0f} tokens/s")
    for name, value in last.under(UTILISATION_PREFIX).items():
        text.append(f"  {name} {value:.0%} busy")
    return text


def _policies(progress: orchestrator_pb2.RunProgress) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("policy", "waiting", "running", "rows to train", "instances"):
        table.add_column(name, justify="left" if name in ("policy", "instances") else "right")
    instances: dict[str, list[str]] = {}
    for instance in progress.instances:
        state = instance_state(instance.state)
        label = f"{instance.instance_id} v{instance.version} {state} {instance.busy_fraction:.0%}"
        for policy in instance.policies:
            instances.setdefault(policy, []).append(label)
    for policy in sorted({*instances, *progress.queues, *progress.rows_waiting}):
        queue = progress.queues.get(policy)
        rows = progress.rows_waiting.get(policy, 0)
        table.add_row(
            policy,
            str(queue.num_waiting if queue else 0),
            str(queue.num_running if queue else 0),
            str(rows),
            ", ".join(sorted(instances.get(policy, []))),
        )
    return table


def _slots(progress: orchestrator_pb2.RunProgress) -> Text:
    text = Text("slots")
    for slot in progress.slots:
        holder = slot.policy or "free"
        activity = f" {slot.activity}" if slot.activity else ""
        text.append(f"  {slot.slot}: ")
        text.append(holder + activity, style="bold" if slot.policy else "dim")
    return text
