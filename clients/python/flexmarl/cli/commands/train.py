"""`flexmarl train`: check, start a cluster, store the run, watch it, write what it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from flexmarl.cli.cluster.attach import parse_cluster
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.cluster.plan import ENGINE_HOST, ClusterSettings, check_plan
from flexmarl.cli.errors import CliError
from flexmarl.cli.output import print_line
from flexmarl.cli.preflight.run import check_run, load_run_config, notes_of
from flexmarl.cli.progress.outputs import check_new
from flexmarl.core.ids import check_name


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
    check_plan(cluster_folder, settings)
    check_run(config, max_engines=settings.value(ENGINE_HOST, "max_engines") or 0)
    for note in notes_of(config):
        print_line(note)
    # Imported after the checks: bad input is told at once, and gRPC takes its time.
    from flexmarl.cli.launch import launch

    return launch(
        run_id,
        config,
        folder=folder,
        cluster_folder=cluster_folder,
        settings=settings,
        addresses=addresses,
    )


def _new_run_id(name: str) -> str:
    now = datetime.now(tz=UTC).strftime("%Y%m%d-%H%M%S")
    return check_name(f"{name[: 64 - len(now) - 1]}-{now}", what="run id")
