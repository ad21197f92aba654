"""`flexmarl stop`: end a run so that it can be resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.cli.commands.runs import status_name
from flexmarl.cli.connect import addresses_of_running
from flexmarl.cli.output import print_line
from flexmarl.client.orchestrator import OrchestratorClient

_PATIENCE_S: Final = 10.0


def stop(run_id: str, *, finish_batch: bool, data_dir: Path, cluster: Sequence[str]) -> None:
    """Stop a run.

    Raises:
        CliError: No cluster runs.
        DomainError: RUN_NOT_FOUND: its orchestrator does not drive the run.
    """
    address = addresses_of_running(data_dir, cluster).orchestrator
    progress = asyncio.run(_stop(run_id, address, finish_batch=finish_batch))
    if progress.status == common_pb2.RUN_STATUS_RUNNING:
        print_line(f"run {run_id} stops after batch {progress.version}; it can be resumed then")
    else:
        print_line(
            f"run {run_id}: {status_name(progress.status)} at version {progress.version}; "
            f"go on with: flexmarl resume {run_id}"
        )


async def _stop(run_id: str, address: str, *, finish_batch: bool) -> orchestrator_pb2.RunProgress:
    async with OrchestratorClient.connect(address, patience_s=_PATIENCE_S) as orchestrator:
        return await orchestrator.stop_run(run_id, finish_batch=finish_batch)
