"""What a person sees of a run, and what its folder holds."""

from __future__ import annotations

import json
import math

import pytest
from cli.recorded import message, report
from rich.console import Console

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.cli.errors import CliError
from flexmarl.cli.progress.live import LiveView, render
from flexmarl.cli.progress.outputs import RunOutputs, check_new, is_complete, summary
from flexmarl.cli.progress.plain import PlainView
from flexmarl.cli.progress.report import numbers_of
from flexmarl.runtime.run_config import RunConfig


def run_config() -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "x",
            "versions": 2,
            "workflow": {"entry": "a:b", "reward": "a:c"},
            "dataset": {"path": "q.jsonl"},
            "batch": {"groups": 1, "samples_per_group": 2},
            "agents": {"sorter": {"policy": "sorter"}},
            "policies": {"sorter": {"model": {"path": "m"}}},
        }
    )


def test_alarms_are_lines_of_their_own():
    alarmed = report(3, 0.0)
    alarmed.batch.metrics["alarm/zero_rewards"] = 32
    alarmed.batch.metrics["alarm/reward_failures"] = 2
    lines: list[str] = []
    PlainView(lines.append).update(message(alarmed))
    assert lines[1:] == [
        "ALARM at version 3: the reward function failed on 2 sample(s)",
        "ALARM at version 3: every reward is 0 (32 samples): look at what the reward function is "
        "given; if that is right, the task is too hard for a start: reward parts of it",
    ]
    console = Console(width=200, record=True, force_terminal=False)
    console.print(render(message().progress, [numbers_of(alarmed)], elapsed_s=1.0))
    assert "ALARM: every reward is 0 (32 samples)" in console.export_text()


def test_plain_lines_of_a_recorded_run():
    lines: list[str] = []
    now = 0.0
    with PlainView(lines.append, clock=lambda: now) as view:
        view.say("starting the cluster ...")
        view.update(message(stage="starting", waits=("splitter-0: importing", "slot0: warming")))
        view.update(message(stage="starting", waits=("splitter-0: importing", "slot0: warming")))
        view.update(message(waits=("8 samples",)))
        view.update(message(waits=("7 samples",)))
        view.update(message(report(0, 0.125), report(1, 0.25)))
        view.update(message())
        now = 10.0
        view.update(message(waits=("a", "b", "c", "d")))
        view.update(message())
    assert lines == [
        "starting the cluster ...",
        "waiting for: splitter-0: importing; slot0: warming",
        # The wait is over: it must not be the last thing on the screen during the rollout.
        "batch 2: rollout, 5 of 32 samples ended, 1 of 4 groups; waiting for: 8 samples",
        "version 0/60  team 0.125  sorter 0.062  step 1.25 s (rollout 0.75, training tail 0.50)  "
        "tokens/s sampled 3000, trained 7000  groups dropped 1  rows void 2",
        "version 1/60  team 0.250  sorter 0.125  step 1.25 s (rollout 0.75, training tail 0.50)  "
        "tokens/s sampled 3000, trained 7000  groups dropped 1  rows void 2",
        # A sign of life after a silence.
        "batch 2: rollout, 5 of 32 samples ended, 1 of 4 groups; waiting for: a; b; c (and 1 more)",
    ]


def test_a_policy_that_trains_on_nothing_is_named_with_the_reasons():
    lines: list[str] = []
    given = report(0, 0.125)
    given.batch.policies["merger"].voided["no_reward"] = 16
    given.batch.policies["merger"].finished = 16
    PlainView(lines.append).update(message(given))
    assert lines[0].endswith("rows void 18  not trained: merger (no_reward 16)")
    assert numbers_of(given).to_json()["rows_void/merger/no_reward"] == 16


def test_the_screen_shows_what_matters():
    console = Console(width=140, record=True, force_terminal=False)
    history = [numbers_of(report(0, 0.125)), numbers_of(report(1, 0.25))]
    progress = message(waits=("8 samples of sorter", "store: commit version 3")).progress
    progress.reasons.add(what="store: commit version 3", waited_ms=2500)
    console.print(render(progress, history, elapsed_s=12.0))
    text = console.export_text()
    for part in (
        "quickstart-1  version 2/60  rollout  groups 1/4  samples 5/32 (69 seen)  12 s",
        "0.250",  # team reward now
        "▁█",  # its curve
        "sorter-0 v2 serving 80%",
        "slot0: sorter gradients",
        "slot1: free",
        "rollout 0.75",
        "3000 tokens/s",
        "rollout 50% busy",
        "waits for 8 samples of sorter\n",
        "waits for store: commit version 3 (2.5 s)",
    ):
        assert part in text, text
    row = next(line for line in text.splitlines() if "sorter-0 v2" in line)
    assert row.split()[:4] == ["sorter", "7", "9", "12"]


def test_the_screen_names_a_policy_that_trains_on_nothing():
    console = Console(width=140, record=True, force_terminal=False)
    given = report(1, 0.25)
    given.batch.policies["merger"].voided["no_reward"] = 16
    console.print(render(message().progress, [numbers_of(given)], elapsed_s=12.0))
    assert "not trained at version 1: merger (no_reward 16)" in console.export_text()


def test_the_live_view_ends_with_the_last_state(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = Console(width=140, force_terminal=True)
    with LiveView(console) as view:
        view.update(message(report(0, 0.125)))
        view.say("meg_store: serves again")
    said = capsys.readouterr().out
    assert "meg_store: serves again" in said
    assert said.endswith("\x1b[?25h")  # the cursor is shown again


def test_a_run_folder_grows_with_the_run(tmp_path):
    outputs = RunOutputs(tmp_path / "runs" / "x")
    outputs.open(run_config())
    assert not outputs.folder.parent.exists()  # a run that trains nothing leaves nothing
    outputs.add(numbers_of(report(0, 0.125)))
    first = json.loads(outputs.metrics_file.read_text())  # flushed: readable before the end
    assert first["version"] == 0
    assert first["team_reward"] == 0.125
    assert first["reward/sorter"] == 0.0625
    assert first["tokens_per_s/sampled"] == 3000
    assert first["utilisation/rollout"] == 0.5
    assert first["step/training_tail_s"] == 0.5
    assert (first["rows_consumed/sorter"], first["rows_void/sorter"]) == (8, 2)
    assert all(math.isfinite(value) for value in first.values())
    outputs.add(numbers_of(report(0, 0.125)))  # a report that is sent again counts once
    outputs.add(numbers_of(report(1, 0.5)))
    outputs.close()
    assert [json.loads(line)["version"] for line in outputs.metrics_file.open()] == [0, 1]
    assert RunConfig.model_validate_json(outputs.config_file.read_text()) == run_config()


def test_a_finished_run_is_complete_with_the_weights_of_every_policy(tmp_path):
    outputs = RunOutputs(tmp_path)
    run = graph_pb2.Run(models={name: graph_pb2.ModelRef() for name in ("sorter", "merger")})
    outputs.policy_folder("sorter").mkdir(parents=True)
    assert not is_complete(tmp_path, run)
    outputs.policy_folder("merger").mkdir()
    assert is_complete(tmp_path, run)


def test_the_plot_is_a_picture(tmp_path):
    outputs = RunOutputs(tmp_path)
    outputs.open(run_config())
    outputs.add(numbers_of(report(0, 0.125)))
    assert outputs.plot() == outputs.plot_file
    assert outputs.plot_file.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_versions_has_no_plot(tmp_path):
    outputs = RunOutputs(tmp_path)
    assert outputs.plot() is None
    assert summary(outputs.history) == ["no version was finished"]


def test_the_summary_compares_start_and_end():
    history = [numbers_of(report(version, version / 10)) for version in range(8)]
    lines = summary(history)
    assert lines[0] == "reward team: 0.000 at version 0, 0.500 over the last 5"
    assert lines[-1] == "rows: 64 trained on, 16 void"


def test_the_folder_of_another_run_is_refused(tmp_path):
    with pytest.raises(CliError, match="exists already"):
        check_new(tmp_path)
