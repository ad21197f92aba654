"""The folder of a run: `runs/<id>/`, filled while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.cli.errors import CliError
from flexmarl.cli.progress.report import AGENT_PREFIX, EVALUATION_PREFIX, VersionNumbers
from flexmarl.cli.progress.trackers import Tracker, open_trackers
from flexmarl.runtime.run_config import RunConfig


class RunOutputs:
    """Writes what a run leaves for people.

    The folder appears with the first version: a run that ends before that leaves nothing here.
    `config.json` is written then, `metrics.jsonl` a line per version as it comes, the plot at the
    end. Opening the folder again (a resumed run) writes `metrics.jsonl` anew: the orchestrator
    reports every committed version again.

    Args:
        folder: `runs/<id>`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history: list[VersionNumbers] = []
        self._metrics: IO[str] | None = None
        self._config: RunConfig | None = None
        self._trackers: list[Tracker] = []

    @property
    def metrics_file(self) -> Path:
        """One JSON object per version."""
        return self.folder / "metrics.jsonl"

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.folder / "config.json"

    @property
    def plot_file(self) -> Path:
        """Reward over versions."""
        return self.folder / "reward.png"

    def policy_folder(self, policy: str) -> Path:
        """Hugging Face folder of a policy."""
        return self.folder / "policies" / policy

    def open(self, config: RunConfig) -> None:
        """Take the configuration, to be written with the first version."""
        self._config = config

    def add(self, numbers: VersionNumbers) -> None:
        """Append a version; a version that was there already is left out."""
        if any(item.version == numbers.version for item in self.history):
            return
        self.history.append(numbers)
        metrics = self._metrics or self._begin()
        metrics.write(json.dumps(numbers.to_json()) + "\n")
        metrics.flush()
        for tracker in self._trackers:
            tracker.add(numbers)

    def _begin(self) -> IO[str]:
        assert self._config is not None, "open comes first"
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._config.model_dump(mode="json"), indent=2)
        self.config_file.write_text(text + "\n", encoding="utf-8")
        self._metrics = self.metrics_file.open("w", encoding="utf-8")
        self._trackers = open_trackers(self._config, run_id=self.folder.name, folder=self.folder)
        return self._metrics

    def close(self) -> None:
        """Close the files."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []

    def plot(self) -> Path | None:
        """Draw the rewards; None without matplotlib or without versions."""
        rewards = [item for item in self.history if item.team_reward is not None]
        if not rewards:
            return None
        try:
            from flexmarl.cli.progress.plot import plot_rewards
        except ImportError:
            return None
        plot_rewards(rewards, self.plot_file)
        return self.plot_file


def is_complete(folder: Path, run: graph_pb2.Run) -> bool:
    """Whether the folder of a finished run has the weights of every policy."""
    outputs = RunOutputs(folder)
    return all(outputs.policy_folder(name).is_dir() for name in run.models)


def check_new(folder: Path) -> None:
    """Refuses the folder of an earlier run.

    Raises:
        CliError: It exists.
    """
    if folder.exists():
        raise CliError(
            f"{folder}: exists already; choose another --run-id, or go on with that run: "
            f"flexmarl resume {folder.name}"
        )


def summary(history: Sequence[VersionNumbers]) -> list[str]:
    """What came out, in lines."""
    trained = [item for item in history if item.is_trained]
    if not trained:
        return ["no version was finished"]
    first, last = trained[0], trained[-5:]
    lines = []
    for label, key in [
        ("team", "team_reward"),
        *((name, AGENT_PREFIX + name) for name in trained[-1].under(AGENT_PREFIX)),
    ]:
        values = [item.metrics[key] for item in last if key in item.metrics]
        if values:
            start = first.metrics.get(key, float("nan"))
            lines.append(
                f"reward {label}: {start:.3f} at version {first.version}, "
                f"{sum(values) / len(values):.3f} over the last {len(values)}"
            )
    lines.extend(_evaluations(history))
    consumed = sum(sum(item.consumed.values()) for item in history)
    voided = sum(item.num_voided for item in history)
    lines.append(f"rows: {consumed} trained on, {voided} void")
    return lines


def _evaluations(history: Sequence[VersionNumbers]) -> list[str]:
    evaluated = [item for item in history if item.under(EVALUATION_PREFIX)]
    lines = []
    for name in ("greedy/team_reward", "sampled/team_reward"):
        found = [(i.version, i.under(EVALUATION_PREFIX).get(name)) for i in evaluated]
        values = [(version, value) for version, value in found if value is not None]
        if values:
            (before, start), (after, end) = values[0], values[-1]
            lines.append(
                f"evaluation {name.replace('/team_reward', '')}: {start:.3f} at version {before}, "
                f"{end:.3f} at version {after}"
            )
    return lines
