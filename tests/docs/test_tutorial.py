"""README, tutorial and how-tos as a new user runs them: bash blocks, in order, in one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from docs.pages import ROOT, RUN_IN_ORDER, TUTORIAL, blocks, write_files

HOME = Path(sys.prefix)
"""What `.venv` is in the pages."""

SHORT = 3


class Reader:
    """Somebody who has cloned the repository, and types what the pages say.

    Args:
        folder: The clone, as far as the pages need it.
        environment: Of the commands, beyond this process's.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._environment = {
            **os.environ,
            "PATH": f"{HOME / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            **(environment or {}),
        }
        (folder / ".venv").symlink_to(HOME)
        for name in ("examples", "scripts", "tests", "pyproject.toml"):
            (folder / name).symlink_to(ROOT / name)
        write_files(folder)

    def run(self, script: str, *, what: str) -> str:
        """Run a script of the shell; returns what it printed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{what}:\n{script}{done.stdout}{done.stderr}"
        return done.stdout

    def read(self, *pages: Path) -> None:
        """Run every block of commands of these pages."""
        for page in pages:
            for block in blocks(page, "bash"):
                self.run(block.text, what=block.page)

    def rewards(self, run_id: str) -> list[float]:
        """The team's rewards of a run, by version."""
        lines = (self.folder / "runs" / run_id / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["team_reward"] for line in lines]

    def tracks(self) -> set[str]:
        """Groups of the timeline that a page had written."""
        events = json.loads((self.folder / "timeline.json").read_text())["traceEvents"]
        return {event["args"]["name"] for event in events if event["name"] == "process_name"}

    def leave(self) -> None:
        """Stop what is left, and remove what was stored."""
        self.run("flexmarl down --purge", what="the end")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.leave()


@pytest.fixture
def hurried(tmp_path: Path) -> Iterator[Reader]:
    """One with a cluster that all commands share, and few versions to train."""
    made = Reader(tmp_path, {"FLEXMARL_CLUSTER": str(tmp_path / ".flexmarl")})
    config = tmp_path / "my_team/config.toml"
    whole = config.read_text()
    config.write_text(whole.replace("versions = 40 ", f"versions = {SHORT} "))
    assert config.read_text() != whole
    try:
        made.run("flexmarl up", what="the shared cluster")
        yield made
    finally:
        made.leave()


@pytest.mark.real
@pytest.mark.timeout(600)
def test_every_command_of_every_page_runs(hurried: Reader) -> None:
    hurried.read(*RUN_IN_ORDER)
    assert len(hurried.rewards("first")) == SHORT
    assert {"batches", "slots", "swaps", "policies"} <= hurried.tracks()
    for name in ("ca.pem", "node1.key", "node2.pem", "alice.pem"):
        assert (hurried.folder / "certs" / name).is_file()
    assert (hurried.folder / "services.token").stat().st_mode & 0o777 == 0o600
    export = "flexmarl export-trajectories first --out FOLDER --format parquet"
    hurried.run(export, what="trajectories.md")
    for block in blocks(ROOT / "docs/trajectories.md", "python"):
        (hurried.folder / "block.py").write_text(block.text)
        shown = hurried.run("python block.py", what=block.page)
        assert "writer" in shown
        assert "editor" in shown


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_new_user_ends_with_a_team_that_has_learnt(reader: Reader) -> None:
    reader.read(TUTORIAL)
    rewards = reader.rewards("first")
    assert len(rewards) == 40
    # It learns; how far in how many versions is the page's figure, not this test's.
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5
    assert {"batches", "slots", "swaps", "policies"} <= reader.tracks()
