"""`flexmarl up`, `down`, `status`: the local cluster in the background."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flexmarl.cli.cluster.attach import RunningCluster, find_running
from flexmarl.cli.cluster.folder import ClusterFolder, process_start_s
from flexmarl.cli.cluster.local import START_TIMEOUT_S
from flexmarl.cli.cluster.plan import ClusterSettings, check_plan
from flexmarl.cli.cluster.purge import purge_folder
from flexmarl.cli.commands.health import SERVING, health_of
from flexmarl.cli.errors import EXIT_FAILED, CliError
from flexmarl.cli.output import print_json, print_line, print_table

_POLL_S: Final = 0.1
_DOWN_TIMEOUT_S: Final = 45.0
_HEALTH_TIMEOUT_S: Final = 2.0
_COLUMNS: Final = ("service", "health", "address", "pid", "restarts", "log")


def up(
    data_dir: Path,
    *,
    slots: int,
    durability: str,
    service_overrides: Sequence[str],
    as_json: bool,
) -> None:
    """Start a cluster in the background and wait until it serves.

    Raises:
        CliError: One runs already, the settings are wrong, or it does not start.
    """
    if durability not in ("process", "fsync"):
        raise CliError(f"--durability {durability!r}: use process or fsync")
    folder = ClusterFolder(data_dir.resolve())
    running = find_running(folder)
    if running is not None:
        raise CliError(f"{data_dir}: process {running.pid} runs a cluster there already")
    settings = ClusterSettings(
        durability=durability, slots=slots, overrides=tuple(service_overrides)
    )
    check_plan(folder, settings)  # bad input ends here, before anything is started
    daemon = _start_daemon(folder, settings)
    running = _wait_up(folder, daemon)
    if as_json:
        print_json({"pid": running.pid, "services": running.services})
    else:
        print_table([{"service": name, **row} for name, row in running.services.items()], _SHORT)
        print_line(f"stop it with: flexmarl down --data-dir {data_dir}")


_SHORT: Final = ("service", "address", "pid", "log")


def down(data_dir: Path, *, purge: bool = False) -> None:
    """Stop the cluster and wait until it is gone.

    Args:
        data_dir: Its folder.
        purge: Remove what it has stored, on disk and in memory; then none has to run.

    Raises:
        CliError: None runs, or it does not stop; or there is nothing to remove.
    """
    folder = ClusterFolder(data_dir.resolve())
    running = find_running(folder)
    if running is None and not purge:
        raise CliError(f"{data_dir}: no cluster runs there")
    if running is not None:
        _stop(running)
    if purge:
        freed = purge_folder(folder)
        print_line(f"removed {data_dir}, {freed / 1e6:.1f} MB")


def _stop(running: RunningCluster) -> None:
    os.kill(running.pid, signal.SIGTERM)
    end = time.monotonic() + _DOWN_TIMEOUT_S
    while process_start_s(running.pid) is not None:
        if time.monotonic() > end:
            # The services follow: each holds a link to the process that started it.
            os.kill(running.pid, signal.SIGKILL)
            raise CliError(
                f"process {running.pid} did not stop within {_DOWN_TIMEOUT_S:g} s and was killed",
                exit_code=EXIT_FAILED,
            )
        time.sleep(_POLL_S)
    print_line("stopped")


def status(data_dir: Path, *, as_json: bool) -> int:
    """Show the services; returns 0 when all are healthy, else 1.

    Raises:
        CliError: No cluster runs.
    """
    running = find_running(ClusterFolder(data_dir.resolve()))
    if running is None:
        raise CliError(
            f"{data_dir}: no cluster runs there; start one: flexmarl up", exit_code=EXIT_FAILED
        )
    rows = asyncio.run(_health_rows(running))
    if as_json:
        print_json({"pid": running.pid, "services": rows})
    else:
        print_table(rows, _COLUMNS)
    return 0 if all(row["health"] == SERVING for row in rows) else EXIT_FAILED


async def _health_rows(running: RunningCluster) -> list[dict[str, Any]]:
    addresses = [str(service["address"]) for service in running.services.values()]
    health = await health_of(addresses, timeout_s=_HEALTH_TIMEOUT_S)
    return [
        {"service": name, "health": state, **service}
        for (name, service), state in zip(running.services.items(), health, strict=True)
    ]


def _start_daemon(folder: ClusterFolder, settings: ClusterSettings) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "flexmarl.cli.cluster.daemon", "--data-dir", str(folder.path)]
    command += ["--slots", str(settings.slots), "--durability", settings.durability]
    for item in settings.overrides:
        command += ["--service-set", item]
    folder.logs.mkdir(parents=True, exist_ok=True)
    with folder.log("up").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait_up(folder: ClusterFolder, daemon: subprocess.Popen[bytes]) -> RunningCluster:
    end = time.monotonic() + START_TIMEOUT_S + 10.0
    while time.monotonic() < end:
        running = find_running(folder)
        if running is not None and running.pid == daemon.pid and running.ready:
            return running
        if daemon.poll() is not None:
            raise _not_started(folder, daemon.returncode)
        time.sleep(_POLL_S)
    daemon.terminate()
    raise CliError(f"the cluster did not start in time; see {folder.logs}", exit_code=EXIT_FAILED)


def _not_started(folder: ClusterFolder, code: int) -> CliError:
    text = folder.log("up").read_text(encoding="utf-8", errors="replace").strip()
    head, _, tail = text.partition("\n")
    message = head.removeprefix("error: ") or f"the cluster ended with exit code {code}"
    return CliError(message, exit_code=code if code > 0 else EXIT_FAILED, detail=tail)
