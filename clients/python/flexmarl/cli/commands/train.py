"""`flexmarl train`: check, start a cluster, store the run, watch it, write what it leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from flexmarl.cli.clients import Clients
from flexmarl.cli.cluster.attach import parse_cluster
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.cluster.plan import ENGINE_HOST, ClusterSettings, plan_services
from flexmarl.cli.errors import CliError
from flexmarl.cli.preflight.run import check_run, load_run_config
from flexmarl.cli.progress.outputs import check_new
from flexmarl.cli.session import Job, run_job
from flexmarl.client.runs import RunSource, store_run
from flexmarl.core.ids import check_name
from flexmarl.runtime.run_config import RunConfig


def train(
    config_path: Path,
    *,
    overrides: Sequence[str],
    cluster: Sequence[str],
    out: Path,
    run_id: str,
    data_dir: Path,
    service_overrides: Sequence[str],
) -> int:
    """Train a run; returns the exit code.

    Raises:
        CliError: Bad input: then nothing was started or written. Or what was started failed.
    """
    config = load_run_config(config_path, overrides)
    run_id = check_name(run_id, what="run id") if run_id else _new_run_id(config.name)
    folder = (out / run_id).resolve()
    check_new(folder)
    settings = ClusterSettings(
        durability=config.durability,
        slots=config.trainer.slots,
        overrides=tuple(service_overrides),
    )
    cluster_folder = ClusterFolder(data_dir.resolve())
    addresses = parse_cluster(list(cluster)) if cluster else None
    if addresses is not None and service_overrides:
        raise CliError("--service-set: only for a cluster that this command starts; drop --cluster")
    plan_services(cluster_folder, settings)
    check_run(config, max_engines=settings.value(ENGINE_HOST, "max_engines") or 0)
    source = RunSource(
        run_id=run_id,
        config_json=config.model_dump_json().encode(),
        portable_config_json=_without_paths(config),
        package=config.workflow.package,
        # What earlier runs left is no part of the workflow, and models travel by themselves.
        exclude=(folder.parent, cluster_folder.path, *_models(config).values()),
        dataset=config.dataset.path,
        models=_models(config),
    )

    async def begin(clients: Clients) -> RunConfig:
        await store_run(clients.store, source, shards=[clients.home_shard])
        await clients.orchestrator.submit_run(run_id, home_shard=clients.home_shard)
        return config

    job = Job(
        run_id=run_id,
        folder=folder,
        cluster_folder=cluster_folder,
        settings=settings,
        addresses=addresses,
        begin=begin,
    )
    return asyncio.run(run_job(job))


def _models(config: RunConfig) -> dict[str, Path]:
    return {name: policy.model.path for name, policy in config.policies.items()}


def _without_paths(config: RunConfig) -> bytes:
    """The configuration as the content hash sees it: files count by content, not by place."""
    data = config.model_dump(mode="json")
    data["workflow"]["package"] = data["dataset"]["path"] = ""
    for policy in data["policies"].values():
        policy["model"]["path"] = ""
    return json.dumps(data, sort_keys=True).encode()


def _new_run_id(name: str) -> str:
    now = datetime.now(tz=UTC).strftime("%Y%m%d-%H%M%S")
    return check_name(f"{name[: 64 - len(now) - 1]}-{now}", what="run id")
