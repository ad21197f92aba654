"""`flexmarl why`: what a run waits for, since when, and what would end it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.cli.commands.runs import status_name
from flexmarl.cli.connect import addresses_of_running
from flexmarl.cli.errors import CliError
from flexmarl.cli.output import print_json, print_line
from flexmarl.client.errors import NotFoundError, UnavailableError
from flexmarl.client.orchestrator import OrchestratorClient

_PATIENCE_S: Final = 2.0


def why(run_id: str, *, data_dir: Path, cluster: Sequence[str], as_json: bool) -> int:
    """Explain a run; returns the exit code.

    Raises:
        CliError: No cluster runs, its orchestrator does not answer, or it does not drive the run.
    """
    addresses = addresses_of_running(data_dir, list(cluster))
    progress = asyncio.run(_read(run_id, addresses.orchestrator))
    if as_json:
        print_json(_as_json(progress))
    else:
        _print(progress)
    return 0


async def _read(run_id: str, address: str) -> orchestrator_pb2.RunProgress:
    async with OrchestratorClient.connect(address, patience_s=_PATIENCE_S) as orchestrator:
        try:
            return await orchestrator.get_run_status(run_id)
        except NotFoundError as error:
            raise CliError(f"{error.message}: flexmarl resume {run_id}") from None
        except UnavailableError as error:
            raise CliError(
                f"the orchestrator at {address} does not answer, so nothing decides what the run "
                f"does next: {error.message}; its cluster starts it again, see flexmarl status"
            ) from None


def _as_json(progress: orchestrator_pb2.RunProgress) -> dict[str, Any]:
    return {
        "run": progress.run_id,
        "status": status_name(progress.status),
        "version": progress.version,
        "stage": progress.stage,
        "waits": [
            {"what": wait.what, "waited_s": wait.waited_ms / 1e3, "ends": wait.ends}
            for wait in progress.reasons
        ],
        "rollout": list(progress.waits),
        "failure": progress.failure.message or None,
    }


def _print(progress: orchestrator_pb2.RunProgress) -> None:
    state = status_name(progress.status)
    line = f"run {progress.run_id}: {state}, version {progress.version} of {progress.num_versions}"
    if progress.status != common_pb2.RUN_STATUS_RUNNING:
        failure = f": {progress.failure.message}" if progress.failure.message else ""
        print_line(f"{line}{failure}; it waits for nothing")
        return
    print_line(f"{line}, {progress.stage}; it waits for")
    for wait in progress.reasons:
        print_line(f"{wait.waited_ms / 1e3:8.1f} s  {wait.what}")
        print_line(f"            ends with: {wait.ends}")
    known = {wait.what for wait in progress.reasons}
    for what in progress.waits:
        if what not in known and not what.startswith("timer: "):
            print_line(f"            also: {what}")
    if not progress.reasons:
        print_line("            nothing: its next step is being decided")
