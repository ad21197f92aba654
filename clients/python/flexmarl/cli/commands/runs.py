"""`flexmarl runs` and `flexmarl show`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.connect import with_store
from flexmarl.cli.errors import CliError
from flexmarl.cli.output import print_json, print_line, print_table
from flexmarl.client.store import StoreClient

_SHOWN_SAMPLES: Final = 8


def runs(*, data_dir: Path, cluster: Sequence[str], as_json: bool) -> None:
    """List the stored runs, newest first."""

    async def read(store: StoreClient, _folder: ClusterFolder) -> list[dict[str, Any]]:
        return [await _summary(store, run) for run in await store.list_runs()]

    rows = with_store(read, data_dir=data_dir, cluster=cluster)
    if as_json:
        print_json(rows)
    elif rows:
        print_table(rows, ["run", "status", "version", "created"])
    else:
        print_line("no runs are stored here")


def show(
    run_id: str,
    *,
    batch: int | None = None,
    all_samples: bool = False,
    data_dir: Path,
    cluster: Sequence[str],
    as_json: bool,
) -> None:
    """Show one run, with samples of a batch: of the newest one that has been committed by default.

    Raises:
        CliError: No such run, or no sample of that batch.
    """

    async def read(store: StoreClient, _folder: ClusterFolder) -> dict[str, Any]:
        return await _details(store, run_id, batch=batch)

    details = with_store(read, data_dir=data_dir, cluster=cluster)
    if as_json:
        print_json(details)
    else:
        num_samples = len(details["samples"])
        _print_details(details, num_shown=num_samples if all_samples else _SHOWN_SAMPLES)


async def _summary(store: StoreClient, run: graph_pb2.Run) -> dict[str, Any]:
    newest = await store.get_manifest(run.run_id)
    return {
        "run": run.run_id,
        "status": status_name(run.status),
        "version": None if newest is None else newest.version,
        "created": _time(run.created_unix_ns),
        "failure": run.failure.message or None,
    }


async def _details(store: StoreClient, run_id: str, *, batch: int | None) -> dict[str, Any]:
    run = await store.get_run(run_id)
    manifests = await store.list_manifests(run_id)
    batches = [manifest.batch for manifest in manifests if manifest.HasField("batch")]
    chosen = batches[-1].batch if batch is None and batches else batch
    samples = [] if chosen is None else await store.list_samples(run_id, batch=chosen)
    if batch is not None and not samples:
        newest = f"its newest committed batch is {batches[-1].batch}" if batches else "it has none"
        raise CliError(f"--batch {batch}: run {run_id} has no samples of that batch; {newest}")
    return {
        **await _summary(store, run),
        "content_hash": run.content_hash,
        "returns": [{"version": each.version, "newest": each.newest} for each in run.returns],
        "config": json.loads(run.config_json),
        "policies": [] if not manifests else _policies(manifests[-1]),
        "versions": [_batch(batch) for batch in batches],
        "samples": [_sample(sample) for sample in samples],
    }


def _policies(manifest: graph_pb2.Manifest) -> list[dict[str, Any]]:
    return [
        {
            "policy": name,
            "updates": entry.num_updates,
            "weights_hash": entry.weights_hash,
            "weights": entry.weights.key,
        }
        for name, entry in sorted(manifest.policies.items())
    ]


def _batch(batch: graph_pb2.BatchRecord) -> dict[str, Any]:
    policies = {name: counts for name, counts in batch.policies.items() if name}
    return {
        "version": batch.batch,
        "groups": batch.num_groups_closed,
        "dropped": batch.num_groups_dropped,
        "finished": sum(counts.finished for counts in policies.values()),
        "consumed": sum(counts.consumed for counts in policies.values()),
        "void": sum(sum(counts.voided.values()) for counts in policies.values()),
        **dict(sorted(batch.metrics.items())),
    }


def _sample(sample: graph_pb2.Sample) -> dict[str, Any]:
    rewards = sample.rewards
    return {
        "sample": sample.sample_id,
        "status": common_pb2.SampleStatus.Name(sample.status)
        .removeprefix("SAMPLE_STATUS_")
        .lower(),
        "team_reward": rewards.team if rewards.HasField("team") else None,
        "vertices": sample.num_vertices,
        "failure": sample.failure.message or None,
    }


def _print_details(details: dict[str, Any], *, num_shown: int) -> None:
    for key in ("run", "status", "version", "created", "content_hash", "failure"):
        if details[key] is not None:
            print_line(f"{key.replace('_', ' ')}: {details[key]}")
    for each in details["returns"]:
        print_line(f"returned from version {each['newest']} to {each['version']}: state was lost")
    if details["policies"]:
        print_line("")
        print_table(details["policies"], ["policy", "updates", "weights_hash"])
    if details["versions"]:
        columns = ["version", "team_reward", "groups", "dropped", "finished", "consumed", "void"]
        print_line("")
        print_table(details["versions"], columns)
    if details["samples"]:
        print_line("")
        print_table(details["samples"][:num_shown], ["sample", "status", "team_reward", "vertices"])
        more = len(details["samples"]) - num_shown
        if more > 0:
            print_line(f"... and {more} more samples: --all; another batch: --batch N")
        print_line(f"what a sample did: flexmarl graph {details['run']} SAMPLE")


def status_name(status: int) -> str:
    """Name of a run's state, as people see it."""
    name: str = common_pb2.RunStatus.Name(status)  # type: ignore[arg-type]
    return name.removeprefix("RUN_STATUS_").lower()


def _time(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, tz=UTC).strftime("%Y-%m-%d %H:%M:%SZ")
