"""The tutorial and the how-tos as a new user runs them: bash blocks, in order, in one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs.pages import ROOT, RUN_IN_ORDER, blocks, write_files

pytestmark = pytest.mark.long


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    write_files(tmp_path)
    yield tmp_path
    done = shell("flexmarl down --purge", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_every_command_does_what_the_page_says(folder: Path) -> None:
    for page in RUN_IN_ORDER:
        for block in blocks(page, "bash"):
            done = shell(block.text, folder)
            assert done.returncode == 0, f"{page.name}:\n{block.text}{done.stdout}{done.stderr}"
    lines = (folder / "runs/first/metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["team_reward"] for line in lines]
    assert len(rewards) == 40
    # It learns; how far in how many versions is the page's figure, not this test's.
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5
    trace = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {"batches", "slots", "swaps", "policies"} <= {
        event["args"]["name"] for event in trace if event["name"] == "process_name"
    }
