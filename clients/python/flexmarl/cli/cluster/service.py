"""One supervised service: started, watched, started again on the same address when it dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from flexmarl.cli.cluster.folder import read_json
from flexmarl.cli.cluster.plan import ServiceSpec
from flexmarl.cli.cluster.restarts import GiveUp, RestartPolicy
from flexmarl.cli.errors import EXIT_FAILED, CliError
from flexmarl.runtime.children import ChildProcess, Children
from flexmarl.runtime.main import EXIT_START_REFUSED

_POLL_S: Final = 0.02
_LOG_TAIL_LINES: Final = 20


class SupervisedService:
    """Keeps one service running until it is told to stop.

    Its life is `run`, which the cluster owns as a task. `run` waits for the death of the process
    and ends when `stop` or `kill` was called, or raises when the service cannot be kept running.

    Args:
        spec: What to run.
        children: Starts and records the process.
        tell: Takes lines for a person.
        changed: Called when state, pid or restarts changed.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        *,
        children: Children,
        tell: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.state = "starting"
        self.num_restarts = 0
        self._children = children
        self._tell = tell
        self._changed = changed
        self._restarts = RestartPolicy()
        self._ready = asyncio.Event()
        self._was_ready = False
        self._stop_asked = asyncio.Event()
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while there is no process."""
        return None if self._child is None else self._child.pid

    async def run(self) -> None:
        """Run the service until it is stopped.

        Raises:
            CliError: It refuses to start, or dies again and again; with the end of its log.
        """
        while not self._stop_asked.is_set():
            code = await self._run_once()
            if self._stop_asked.is_set():
                break
            await self._after_death(code)
        self._set_state("stopped")

    async def wait_ready(self) -> None:
        """Wait until the service serves; the caller sets the deadline."""
        await self._ready.wait()

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM, SIGKILL after `grace_s`."""
        self._stop_asked.set()
        if self._child is not None:
            await self._child.stop(grace_s=grace_s)

    def kill(self) -> None:
        """SIGKILL, now."""
        self._stop_asked.set()
        if self._child is not None:
            self._child.kill()

    def describe(self) -> dict[str, object]:
        """As written to the cluster's file."""
        return {
            "address": self.spec.address,
            "pid": self.pid,
            "state": self.state,
            "restarts": self.num_restarts,
            "log": str(self.spec.log_file),
        }

    async def _run_once(self) -> int:
        self.spec.address_file.unlink(missing_ok=True)
        self._ready.clear()
        child = await self._children.spawn_exec(
            self.spec.module,
            self.spec.args,
            name=self.spec.name,
            env={"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")},
            log_file=self.spec.log_file,
        )
        self._child = child
        if self._stop_asked.is_set():  # asked for while the process was being made
            child.terminate()
        self._set_state("starting")
        watch = asyncio.create_task(self._watch_ready(child.pid), name=f"{self.spec.name} ready")
        try:
            return await child.wait()
        finally:
            watch.cancel()
            self._child = None
            self._ready.clear()
            child.link.close()

    async def _watch_ready(self, pid: int) -> None:
        # Freed by the service, which writes the file when it serves; cancelled at its death.
        while (read_json(self.spec.address_file) or {}).get("pid") != pid:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        if self._was_ready:
            self._tell(f"{self.spec.name}: serves again")
        self._was_ready = True
        self._ready.set()
        self._set_state("ready")

    async def _after_death(self, code: int) -> None:
        what = f"{self.spec.name} {_ending(code)}"
        if code == EXIT_START_REFUSED and not self._was_ready:
            self._set_state("failed")
            raise CliError(refusal(self.spec.log_file) or f"{what}; see {self.spec.log_file}")
        match self._restarts.died(now=time.monotonic()):
            case GiveUp(reason):
                self._set_state("failed")
                raise CliError(
                    f"{what}, and not for the first time: {reason}; see {self.spec.log_file}",
                    exit_code=EXIT_FAILED,
                    detail=log_tail(self.spec.log_file),
                )
            case restart:
                self._tell(f"{what}; starting it again at {self.spec.address}")
                self.num_restarts += 1
                self._set_state("restarting")
                await asyncio.sleep(restart.delay_s)

    def _set_state(self, state: str) -> None:
        self.state = state
        self._changed()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def log_tail(path: Path, *, num_lines: int = _LOG_TAIL_LINES) -> str:
    """The last lines of a service's log, shortened for a person."""
    return "\n".join(_readable(line) for line in _last_lines(path)[-num_lines:])


def refusal(path: Path) -> str | None:
    """The one line with which a service refused to start; None when the log has none."""
    for line in reversed(_last_lines(path)):
        head, colon, message = line.partition(": ")
        if colon and head.startswith("flexmarl ") and not line.startswith("{"):
            return f"{head.removeprefix('flexmarl ')}: {message}"
    return None


def _last_lines(path: Path, *, max_bytes: int = 64 << 10) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - max_bytes, 0))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _readable(line: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict):
        return line
    text = f"{entry.get('timestamp', '')} {entry.get('level', '')} {entry.get('event', '')}"
    for key in ("error", "message", "exception"):
        if key in entry:
            text += f" {entry[key]}"
    return text.strip()
