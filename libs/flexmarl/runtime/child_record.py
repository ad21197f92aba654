"""A file that names a service's children, so that its next start can end what a crash left behind.

Pids are reused: a leftover is ended only when the recorded start time matches, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

_START_TOLERANCE_S: Final = 2.0
# The kernel counts from boot, and the boot's wall time moves with clock adjustments. A reused pid
# would need the whole pid space within this time.


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedChild:
    """One child: its pid, when it started (seconds since the epoch), and its name."""

    pid: int
    started_s: float
    name: str


class ChildRecord:
    """Keeps the file equal to the set of living children.

    Args:
        path: JSON file, replaced atomically at each change.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._children: dict[int, RecordedChild] = {}

    def add(self, *, pid: int, name: str) -> None:
        """Record a child that was just started; one that is gone already is left out."""
        try:
            started_s = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            return
        self._children[pid] = RecordedChild(pid=pid, started_s=started_s, name=name)
        self._write()

    def remove(self, pid: int) -> None:
        """Forget a child that ended."""
        if self._children.pop(pid, None) is not None:
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text(json.dumps([asdict(child) for child in self._children.values()]))
        temporary.replace(self._path)


def end_leftovers(path: Path, *, grace_s: float = 2.0) -> list[str]:
    """End the children that the previous process of this service left; call it before binding.

    SIGTERM to each process group, SIGKILL after `grace_s`. Blocks at most about `grace_s` + 1 s.

    Returns:
        Names of the children that were ended.
    """
    leftovers = [(child, process) for child in _read(path) if (process := _same_process(child))]
    for child, _ in leftovers:
        _signal_group(child.pid, signal.SIGTERM)
    _, alive = psutil.wait_procs([process for _, process in leftovers], timeout=grace_s)
    for process in alive:
        _signal_group(process.pid, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=1.0)
    path.unlink(missing_ok=True)
    return [child.name for child, _ in leftovers]


def _read(path: Path) -> list[RecordedChild]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [RecordedChild(**entry) for entry in entries]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError):
        # Replaced atomically, so this is a foreign file: naming nobody is the safe reading.
        return []


def _same_process(child: RecordedChild) -> psutil.Process | None:
    try:
        process = psutil.Process(child.pid)
        same = abs(process.create_time() - child.started_s) <= _START_TOLERANCE_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
