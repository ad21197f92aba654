"""`flexmarl runs delete`: remove a run and give its space back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.connect import orchestrator_beside, with_store
from flexmarl.cli.output import print_line
from flexmarl.client.orchestrator import OrchestratorClient
from flexmarl.client.store import StoreClient

_PATIENCE_S: Final = 10.0


def delete(run_id: str, *, data_dir: Path, cluster: Sequence[str]) -> None:
    """Remove a run that is not driven, and all below it, from its store shards.

    Raises:
        CliError: No such run.
        DomainError: STATE_TRANSITION_REFUSED while it is driven.
    """

    async def remove(store: StoreClient, folder: ClusterFolder) -> None:
        await store.get_run(run_id)  # an unknown run is an error
        address = orchestrator_beside(folder, cluster)
        if not address:
            await store.delete_run(run_id)
            return
        stats = await store.get_stats()
        home = common_pb2.ShardAddress(name=stats.shard, address=store.address)
        async with OrchestratorClient.connect(address, patience_s=_PATIENCE_S) as orchestrator:
            await orchestrator.delete_run(run_id, home_shard=home)

    with_store(remove, data_dir=data_dir, cluster=cluster)
    print_line(f"{run_id}: removed; what it left in files stays")
