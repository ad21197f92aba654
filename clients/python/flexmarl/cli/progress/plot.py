"""The reward plot; apart, because matplotlib takes a second to import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from flexmarl.cli.progress.report import AGENT_PREFIX, VersionNumbers

matplotlib.use("Agg")


def plot_rewards(history: Sequence[VersionNumbers], path: Path) -> None:
    """Draw team and agent rewards over versions into a PNG file, atomically."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names = sorted({name for item in history for name in item.under(AGENT_PREFIX)})
    for label, key in [("team", "team_reward"), *((name, AGENT_PREFIX + name) for name in names)]:
        points = [(item.version, item.metrics[key]) for item in history if key in item.metrics]
        axes.plot(
            [version for version, _ in points],
            [value for _, value in points],
            label=label,
            linewidth=2.2 if label == "team" else 1.0,
            marker="." if len(points) < 10 else None,
        )
    axes.set_xlabel("version")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
