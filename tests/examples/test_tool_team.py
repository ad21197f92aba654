"""The tool team: its rules, and two versions trained by the real services."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.tool_team import team
from flexmarl.rollout.workflow import FinishedSample, Output

FOLDER = Path(__file__).resolve().parents[2] / "examples/tool_team"
FLEXMARL = str(Path(sys.executable).with_name("flexmarl"))


@pytest.mark.parametrize(
    ("secret", "guess", "verdict"),
    [("3", "3", "="), ("3", "5", "<"), ("3", "0", ">"), ("3", "<", "!"), ("3", "", "!")],
)
def test_the_tool_says_where_the_secret_is(secret: str, guess: str, verdict: str) -> None:
    assert team.compare(secret, guess) == verdict


def call(agent: str, number: int) -> Output:
    return Output("3", (3,), "length", f"s/0:{number}", agent, f"0:{number}", value="3")


@pytest.mark.parametrize(
    ("found", "guesses", "score"), [(True, 1, 1.0), (True, 3, 0.6), (False, 3, 0.0)]
)
def test_quicker_games_earn_more(found: bool, guesses: int, score: float) -> None:
    calls = (call("scout", 0), *(call("guesser", n + 1) for n in range(guesses)))
    rewards = team.reward(FinishedSample(query={}, output=found, calls=calls))
    assert rewards.team == pytest.approx(score)
    assert rewards.agents == pytest.approx({"scout": score, "guesser": score})
    assert rewards.metrics == {"guesses": guesses}


def flexmarl(*args: str, timeout_s: float = 120) -> str:
    done = subprocess.run(
        [FLEXMARL, *args],
        capture_output=True, text=True, timeout=timeout_s, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.real
@pytest.mark.timeout(150)
def test_two_versions_are_trained_with_games_as_rows(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flexmarl(
        "train", str(FOLDER / "config.toml"), "--out", str(out),
        *("--set", "versions=2", "--set", "batch.groups=4", "--set", "batch.samples_per_group=4"),
    )  # fmt: skip
    (metrics,) = out.glob("*/metrics.jsonl")
    versions = [json.loads(line) for line in metrics.open()]
    assert len(versions) == 2
    for numbers in versions:
        assert numbers["num_samples"] == 16
        assert 1 <= numbers["metric/guesses"] <= 3
        # Every turn of every game is accounted for, whatever the number of rows.
        turns = round(numbers["metric/guesses"] * numbers["num_samples"])
        assert numbers["rows_consumed/guesser"] == turns
        assert numbers["tokens/trained"] == numbers["tokens/sampled"]
