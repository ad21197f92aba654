"""`flexmarl export-trajectories`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.connect import with_run
from flexmarl.cli.graph.tokens import TokenTexts
from flexmarl.cli.output import print_line
from flexmarl.client.bundle import materialise
from flexmarl.client.store import StoreClient
from flexmarl.client.trajectories import export_trajectories as export
from flexmarl.client.trajectory_files import check_format


def export_trajectories(
    run_id: str,
    *,
    out: Path,
    format_: str,
    batch: int | None,
    data_dir: Path,
    cluster: Sequence[str],
) -> None:
    """Write a run's tables.

    Raises:
        DomainError: No such run or format, or the folder exists.
    """
    check_format(format_)

    async def write(
        store: StoreClient, folder: ClusterFolder, run: graph_pb2.Run
    ) -> dict[str, int]:
        models = {
            name: await materialise(store, run.models[name], folder.cache)
            for name in sorted(run.models)
        }
        return await export(
            store, run_id, out=out, format_=format_, batch=batch, decode=TokenTexts(models)
        )

    counts = with_run(write, run_id, data_dir=data_dir, cluster=cluster)
    print_line(f"{out}: " + ", ".join(f"{number} {name}" for name, number in counts.items()))
