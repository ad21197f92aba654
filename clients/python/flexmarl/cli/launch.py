"""Training a checked run: what is stored of it, and how it is started."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from flexmarl.cli.clients import Clients, find_shards
from flexmarl.cli.cluster.attach import Addresses
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.cluster.plan import ClusterSettings
from flexmarl.cli.preflight.dataset import dataset_content, held_out_content
from flexmarl.cli.session import Job, run_job
from flexmarl.client.runs import RunSource, check_source, store_run
from flexmarl.runtime.run_config import RunConfig


def launch(
    run_id: str,
    config: RunConfig,
    *,
    folder: Path,
    cluster_folder: ClusterFolder,
    settings: ClusterSettings,
    addresses: Addresses | None,
) -> int:
    """Store, submit and follow a run; returns the exit code.

    Raises:
        DomainError: A file cannot be stored with the run; nothing was started.
        CliError: What was started failed.
    """
    # What runs leave is no part of the workflow.
    source = source_of(run_id, config, exclude=(folder, folder.parent, cluster_folder.path))
    check_source(source)

    async def begin(clients: Clients) -> RunConfig:
        shards = [clients.home_shard, *await find_shards(config)]
        clients.check_durability(config.durability)
        await store_run(clients.store, source, shards=shards)
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


def source_of(run_id: str, config: RunConfig, *, exclude: Sequence[Path] = ()) -> RunSource:
    """What is stored of a run; models that lie in the workflow's folder travel by themselves."""
    models = {name: policy.model.path for name, policy in config.policies.items()}
    return RunSource(
        run_id=run_id,
        config_json=config.model_dump_json().encode(),
        portable_config_json=_without_paths(config),
        package=config.workflow.package,
        exclude=(*exclude, *models.values()),
        dataset=config.dataset.path if config.dataset.path.is_file() else dataset_content(config),
        held_out=held_out_content(config),
        models=models,
        vertex_events=config.vertex_events,
    )


def _without_paths(config: RunConfig) -> bytes:
    """The configuration as the content hash sees it: files count by content, not by place."""
    data = config.model_dump(mode="json")
    data["workflow"]["package"] = data["dataset"]["path"] = data["evaluation"]["path"] = ""
    data["store_shards"] = len(config.store_shards)
    for policy in data["policies"].values():
        policy["model"]["path"] = ""
    return json.dumps(data, sort_keys=True).encode()
