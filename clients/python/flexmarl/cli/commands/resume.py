"""`flexmarl resume`: go on with a stored run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from flexmarl.api.common.v1 import common_pb2
from flexmarl.cli.clients import Clients
from flexmarl.cli.cluster.attach import parse_cluster
from flexmarl.cli.cluster.folder import ClusterFolder, read_json
from flexmarl.cli.cluster.plan import STORE, ClusterSettings
from flexmarl.cli.errors import CliError
from flexmarl.cli.progress.outputs import is_complete
from flexmarl.cli.session import Job, run_job
from flexmarl.core.ids import check_name
from flexmarl.runtime.config import load_config
from flexmarl.runtime.run_config import RunConfig


def resume(
    run_id: str,
    *,
    overrides: Sequence[str],
    cluster: Sequence[str],
    out: Path,
    data_dir: Path,
) -> int:
    """Resume a run, with other settings where they may change; returns the exit code.

    Raises:
        CliError: There is no such run, it is finished, or what was started failed.
    """
    check_name(run_id, what="run id")
    folder = ClusterFolder(data_dir.resolve())
    addresses = parse_cluster(list(cluster)) if cluster else None
    if addresses is None and not folder.service(STORE).is_dir():
        raise CliError(f"{data_dir}: no runs are stored there; name the folder with --data-dir")

    run_folder = (out / run_id).resolve()

    async def begin(clients: Clients) -> RunConfig:
        run = await clients.store.get_run(run_id)
        # Finished, but its folder is not: the command was interrupted while it wrote the weights.
        if run.status == common_pb2.RUN_STATUS_FINISHED and is_complete(run_folder, run):
            raise CliError(f"run {run_id} is finished; look at it: flexmarl show {run_id}")
        config = load_config(RunConfig, stored_json=run.config_json, overrides=overrides)
        await clients.orchestrator.resume_run(
            run_id,
            home_shard=clients.home_shard,
            config_json=config.model_dump_json().encode() if overrides else b"",
        )
        return config

    job = Job(
        run_id=run_id,
        folder=run_folder,
        cluster_folder=folder,
        settings=ClusterSettings.from_json(read_json(folder.settings_file) or {}),
        addresses=addresses,
        begin=begin,
        is_stored=True,
    )
    return asyncio.run(run_job(job))
