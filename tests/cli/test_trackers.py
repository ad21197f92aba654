"""Numbers go where the configuration says, and a missing library is named before a run starts."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from cli.recorded import report
from cli.test_progress import run_config

from flexmarl.cli.errors import CliError
from flexmarl.cli.progress.outputs import RunOutputs, summary
from flexmarl.cli.progress.report import numbers_of
from flexmarl.cli.progress.trackers import check_trackers
from flexmarl.runtime.run_config import RunConfig, TrackersConfig


def tracked(**trackers: Any) -> RunConfig:
    return run_config().model_copy(update={"trackers": TrackersConfig(**trackers)})


@pytest.mark.parametrize("library", ["tensorboard", "wandb"])
def test_a_missing_library_is_bad_input(library: str, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(CliError, match=rf"trackers.{library} = true: pip install {library}"):
        check_trackers(tracked(**{library: True}))
    check_trackers(tracked())


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outputs = RunOutputs(tmp_path / "run")
    outputs.open(tracked(tensorboard=True))
    outputs.add(numbers_of(report(0, 0.125)))
    outputs.add(numbers_of(report(1, 0.25)))
    outputs.close()
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    tags = events.Tags()["tensors"]
    assert "team_reward" in tags
    assert "rows_consumed/sorter" in tags
    assert [event.step for event in events.Tensors("team_reward")] == [0, 1]


def test_weights_and_biases_goes_on_in_the_run_of_the_same_id(tmp_path: Path, monkeypatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Run:
        def log(self, numbers: dict[str, float], *, step: int) -> None:
            calls.append(("log", (step, numbers["team_reward"])))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**given: Any) -> Run:
        calls.append(("init", (given["id"], given["mode"], given["resume"])))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    outputs = RunOutputs(tmp_path / "run-7")
    outputs.open(tracked(wandb=True))
    outputs.add(numbers_of(report(3, 0.5)))
    outputs.close()
    assert calls == [
        ("init", ("run-7", "offline", "allow")),
        ("log", (3, 0.5)),
        ("finish", None),
    ]


def test_weights_and_biases_itself_writes_offline(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    outputs = RunOutputs(tmp_path / "run-8")
    outputs.open(tracked(wandb=True))
    outputs.add(numbers_of(report(0, 0.5)))
    outputs.close()
    assert list((tmp_path / "run-8/wandb").glob("offline-run-*/run-run-8.wandb"))


def test_a_last_version_that_is_evaluated_only_is_in_the_summary() -> None:
    first, last = report(0, 0.125), report(4, 0.0)
    first.batch.metrics["eval/greedy/team_reward"] = 0.25
    last.batch.Clear()
    last.committed_unix_ns = 0
    last.batch.metrics["eval/greedy/team_reward"] = 0.75
    lines = summary([numbers_of(first), numbers_of(last)])
    assert "evaluation greedy: 0.250 at version 0, 0.750 at version 4" in lines
    assert lines[0].startswith("reward team: 0.125 at version 0")
