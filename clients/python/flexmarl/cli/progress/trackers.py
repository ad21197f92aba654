"""Sending a run's numbers to TensorBoard or Weights & Biases, by their own libraries.

`metrics.jsonl` is written always; these are beside it, and only where the configuration names them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from flexmarl.cli.errors import CliError
from flexmarl.cli.progress.report import VersionNumbers
from flexmarl.runtime.run_config import RunConfig, TrackersConfig


class Tracker(Protocol):
    """Where numbers go."""

    def add(self, numbers: VersionNumbers) -> None:
        """Take a version's numbers."""
        ...

    def close(self) -> None:
        """Write what is still held back."""
        ...


class TensorBoard:
    """Event files in the run's folder.

    Args:
        folder: Folder of the event files.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import (  # pyright: ignore[reportMissingImports] - optional
            Writer,
        )

        self._writer = Writer(str(folder))

    def add(self, numbers: VersionNumbers) -> None:
        """Take a version's numbers."""
        for name, value in numbers.scalars().items():
            self._writer.add_scalar(name, value, numbers.version)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; offline, its files lie in the run's folder.

    Args:
        config: Project and mode.
        run_id: Id of the run there, too, so that a resumed run goes on in the same one.
        folder: Folder of its files.
        settings: The run's configuration, to be shown beside.
    """

    def __init__(
        self, config: TrackersConfig, *, run_id: str, folder: Path, settings: dict[str, Any]
    ) -> None:
        import wandb  # pyright: ignore[reportMissingImports] - optional

        self._run = wandb.init(
            project=config.wandb_project,
            id=run_id,
            name=run_id,
            dir=str(folder),
            mode=config.wandb_mode,
            resume="allow",
            config=settings,
        )

    def add(self, numbers: VersionNumbers) -> None:
        """Take a version's numbers."""
        self._run.log(numbers.scalars(), step=numbers.version)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def check_trackers(config: RunConfig) -> None:
    """Whether the libraries of the trackers that a run asks for are here.

    Raises:
        CliError: One is not; names its key.
    """
    from importlib.util import find_spec

    wanted = {"tensorboard": config.trackers.tensorboard, "wandb": config.trackers.wandb}
    for library, asked in wanted.items():
        if asked and find_spec(library) is None:
            raise CliError(f"trackers.{library} = true: pip install {library}, or set it to false")


def open_trackers(config: RunConfig, *, run_id: str, folder: Path) -> list[Tracker]:
    """Trackers that a run asks for; they write below its folder."""
    trackers: list[Tracker] = []
    if config.trackers.tensorboard:
        trackers.append(TensorBoard(folder / "tensorboard"))
    if config.trackers.wandb:
        settings = config.model_dump(mode="json")
        trackers.append(
            WeightsAndBiases(config.trackers, run_id=run_id, folder=folder, settings=settings)
        )
    return trackers
