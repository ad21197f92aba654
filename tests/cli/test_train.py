"""`flexmarl train` with real services: interrupted, resumed, finished."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart" / "config.toml"
SMALL = ["versions=1000", "batch.groups=4", "batch.samples_per_group=4"]
"""More versions than it comes to: it is interrupted before its end, however slow a test is."""
_DEADLINE_S = 150.0


class Command:
    """A running command: its lines, and every process that it ever started."""

    def __init__(self, *args: str, cwd: Path, **env: str) -> None:
        self.lines: list[str] = []
        self.processes: dict[int, psutil.Process] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flexmarl.cli.main", *args],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env},
            start_new_session=True,
        )
        self._new_line = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, start: str) -> str:
        """The first line that starts so."""

        def found() -> str | None:
            return next((line for line in self.lines if line.startswith(start)), None)

        with self._new_line:
            assert self._new_line.wait_for(
                lambda: found() or self.process.poll() is not None, timeout=_DEADLINE_S
            ), self.text()
        line = found()
        assert line is not None, self.text()
        return line

    def wait_for_children(self, count: int) -> None:
        """Until so many processes were started."""
        end = time.monotonic() + _DEADLINE_S
        while len(self.processes) < count:
            assert time.monotonic() < end, self.text()
            self.remember_processes()
            time.sleep(0.05)

    def remember_processes(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.processes[child.pid] = child

    def end(self) -> int:
        """Exit code once it ends."""
        code = self.process.wait(timeout=_DEADLINE_S)
        self._reader.join(timeout=10)
        return code

    def living(self) -> list[str]:
        """Names of processes that it left behind."""
        _, alive = psutil.wait_procs(list(self.processes.values()), timeout=10)
        return [" ".join(process.cmdline()) for process in alive]

    def text(self) -> str:
        return "\n".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._new_line:
                self.lines.append(line.rstrip("\n"))
                self._new_line.notify_all()


def shm_of(start) -> list[str]:
    """The memory tier in a folder that the fixture removes."""
    return ["--service-set", f"meg_store.store.shm_dir={start.shm}"]


@pytest.fixture
def start(tmp_path):
    shm = Path("/dev/shm") / f"flexmarl-test-train-{os.getpid()}"
    commands: list[Command] = []

    def run(*args: str, **env: str) -> Command:
        commands.append(Command(*args, cwd=tmp_path, **env))
        return commands[-1]

    run.shm = shm
    yield run
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait()
    shutil.rmtree(shm, ignore_errors=True)


def errors_logged(folder: Path) -> list[str]:
    """What the services of a local cluster have logged as errors."""
    lines = [
        line
        for path in sorted((folder / ".flexmarl" / "logs").glob("*.log"))
        for line in path.read_text().splitlines()
    ]
    assert lines
    return [line for line in lines if '"level": "error"' in line]


@pytest.mark.timeout(400)
def test_a_run_is_interrupted_resumed_and_finished(start, tmp_path):
    sets = [part for item in SMALL for part in ("--set", item)]
    training = start("train", str(EXAMPLE), *sets, *shm_of(start), "--run-id", "r1")
    training.wait_for("version 0/1000")
    training.remember_processes()
    assert len(training.processes) >= 5
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 130, training.text()
    assert training.lines[-1] == "interrupted; go on with: flexmarl resume r1"
    assert training.living() == []
    assert not (tmp_path / ".flexmarl" / "cluster.json").exists()
    assert not (tmp_path / "runs" / "r1" / "policies").exists()

    shown = start("show", "r1", "--json")
    assert shown.end() == 0, shown.text()
    versions = json.loads(shown.text())["version"] + 2
    resumed = start("resume", "r1", "--set", f"versions={versions}")
    assert resumed.end() == 0, resumed.text()
    folder = tmp_path / "runs" / "r1"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [entry["version"] for entry in metrics] == list(range(versions))
    for entry in metrics:
        assert 0 <= entry["team_reward"] <= 1
    assert (folder / "reward.png").stat().st_size > 0
    assert json.loads((folder / "config.json").read_text())["versions"] == versions
    for policy in ("splitter", "sorter", "merger"):
        path = folder / "policies" / policy
        assert f"policy {policy}: {path}" in resumed.lines
        weights = load_file(path / "model.safetensors")
        assert weights
        assert all(np.isfinite(tensor).all() for tensor in weights.values())
    assert errors_logged(tmp_path) == [], "neither stop is an error of any service"


ENDLESS_START = """
import sys, time
if "flexmarl.orchestrator" in sys.orig_argv:
    time.sleep(600)
"""
"""Python reads it first: the orchestrator takes longer to start than any test waits."""


@pytest.mark.timeout(120)
def test_a_command_interrupted_while_its_cluster_starts_leaves_nothing(start, tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(ENDLESS_START)
    path = f"{tmp_path / 'first'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    training = start("train", str(EXAMPLE), *shm_of(start), "--run-id", "r1", PYTHONPATH=path)
    training.wait_for("starting the cluster")
    training.wait_for_children(5)
    # As a terminal does it: to the whole process group, services included.
    os.killpg(training.process.pid, signal.SIGINT)
    assert training.end() == 130, training.text()
    assert training.lines[-1] == "interrupted before the run was stored: train again"
    assert training.living() == []
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / ".flexmarl" / "cluster.json").exists()
