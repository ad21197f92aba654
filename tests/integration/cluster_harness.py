"""Drives a real local cluster through the command line, and looks at it from outside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

FLEXMARL = [str(Path(sys.executable).with_name("flexmarl"))]
QUICKSTART = Path(__file__).parents[2] / "examples/quickstart/config.toml"


@dataclass(frozen=True)
class Size:
    """A shortened quickstart."""

    versions: int = 4
    groups: int = 8
    samples: int = 4
    calls: int = 4

    @property
    def vertices(self) -> int:
        """Agent calls of one batch."""
        return self.groups * self.samples * self.calls

    def overrides(self) -> list[str]:
        """Arguments of `flexmarl train`."""
        sets = {
            "versions": self.versions,
            "batch.groups": self.groups,
            "batch.samples_per_group": self.samples,
            **{
                f"policies.{p}.trainer.micro_batch_rows": 16
                for p in ("splitter", "sorter", "merger")
            },
        }
        return [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]


def run_cli(*args: str, timeout_s: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    return subprocess.run(
        [*FLEXMARL, *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200", **env},
    )


class Cluster:
    """`flexmarl up` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[int, float] = {}

    def up(self, *, slots: int = 2, **service_settings: object) -> None:
        """Starts it; a setting's name has `__` for dots, such as `meg_store__server__port`."""
        sets = [f"{key.replace('__', '.')}={value}" for key, value in service_settings.items()]
        more = [part for item in sets for part in ("--service-set", item)]
        where = ("--data-dir", str(self.folder), "--slots", str(slots))
        done = run_cli("up", *where, *more, timeout_s=240)
        assert done.returncode == 0, done.stdout + done.stderr
        self.note_processes()

    def down(self) -> None:
        self.note_processes()
        # What is stored would stay, in memory too, wherever the folder goes.
        done = run_cli("down", "--purge", "--data-dir", str(self.folder), timeout_s=120)
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "cluster.json").read_text())

    def is_running(self, service: str) -> bool:
        """Whether it has a process: one that was killed has none until it is started again."""
        return self.state["services"][service]["pid"] is not None

    def pid(self, service: str) -> int:
        return int(self.state["services"][service]["pid"])

    def address(self, service: str) -> str:
        return str(self.state["services"][service]["address"])

    @contextmanager
    def held(self) -> Iterator[None]:
        """For the block, the orchestrator stands still: nothing is committed, no run ends.

        Inside of it, it may be killed; another one goes on at once.
        """
        pid = self.pid("orchestrator")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def note_processes(self) -> None:
        """Remembers all processes of the cluster, to ask later whether they are gone."""
        supervisor = psutil.Process(int(self.state["pid"]))
        for process in [supervisor, *supervisor.children(recursive=True)]:
            try:
                self.seen[process.pid] = process.create_time()
            except psutil.NoSuchProcess:
                continue

    def outlived(self, *, within_s: float = 10.0) -> list[str]:
        """Processes that live on after the cluster, once their last moment is over."""
        end = time.monotonic() + within_s
        while (alive := self.survivors()) and time.monotonic() < end:
            time.sleep(0.05)
        return alive

    def survivors(self) -> list[str]:
        """Processes of the cluster that still live."""
        alive = []
        for pid, created in self.seen.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(f"{pid} {' '.join(process.cmdline())[:100]}")
            except psutil.NoSuchProcess:
                continue
        return alive

    def train(self, run_id: str, size: Size, out: Path, *more: str) -> subprocess.Popen[str]:
        """Starts a run and returns its client process."""
        named = ("--run-id", run_id, *size.overrides(), *more)
        return self._client("train", str(QUICKSTART), out, *named)

    def resume(self, run_id: str, out: Path, *more: str) -> subprocess.Popen[str]:
        """Goes on with a run and returns its client process."""
        return self._client("resume", run_id, out, *more)

    def _client(self, command: str, what: str, out: Path, *more: str) -> subprocess.Popen[str]:
        where = ("--cluster", str(self.folder), "--out", str(out))
        return subprocess.Popen(
            [*FLEXMARL, command, what, *where, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        )


def kill(pid: int) -> None:
    """kill -9 of one process that this test started."""
    os.kill(pid, signal.SIGKILL)


async def eventually(
    condition: Callable[[], Any], *, what: str, timeout_s: float = 60.0, every_s: float = 0.05
) -> Any:
    """Waits until `condition` returns something true, and returns it."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return result
        await asyncio.sleep(every_s)
    raise AssertionError(f"waited {timeout_s} s in vain for {what}")
