"""`flexmarl store lost`: giving up a store that will not come back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexmarl.api.common.v1 import common_pb2
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.connect import with_store
from flexmarl.cli.errors import CliError
from flexmarl.cli.output import print_line
from flexmarl.client.store import StoreClient


def lost(shard: str, *, run_id: str, data_dir: Path, cluster: Sequence[str]) -> None:
    """Give a store shard up: runs that have it go on over their other shards.

    Raises:
        CliError: No run that could go on has the shard, apart from its home.
    """

    async def record(store: StoreClient, _folder: ClusterFolder) -> list[str]:
        runs = [await store.get_run(run_id)] if run_id else await store.list_runs()
        chosen = [
            run.run_id
            for run in runs
            if run.status != common_pb2.RUN_STATUS_FINISHED
            and shard in [other.name for other in run.shards[1:]]
            and shard not in run.lost_shards
        ]
        for each in chosen:
            await store.lose_shard(each, shard)
        return chosen

    recorded = with_store(record, data_dir=data_dir, cluster=cluster)
    if not recorded:
        raise CliError(
            f"no unfinished run has a store shard {shard!r} that it could lose; "
            "a run's home shard cannot be given up"
        )
    for each in recorded:
        print_line(f"{each}: goes on without store shard {shard}; its open groups come again")
