"""Clients of a cluster that a run is trained on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.cli.cluster.attach import Addresses
from flexmarl.cli.connect import connect_store
from flexmarl.cli.errors import CliError
from flexmarl.client.orchestrator import OrchestratorClient
from flexmarl.client.store import StoreClient

_PATIENCE_S: Final = 10.0
"""A person waits for an address that may be wrong; `follow_run` has patience of its own."""


@dataclass(frozen=True, slots=True)
class Clients:
    """What the command line talks to.

    Attributes:
        store: MEG Store.
        orchestrator: Orchestrator.
        home_shard: The store, as a run names it.
        durability: Of the store: "process" or "fsync".
    """

    store: StoreClient
    orchestrator: OrchestratorClient
    home_shard: common_pb2.ShardAddress
    durability: str

    def check_durability(self, asked: str) -> None:
        """Makes sure that the store keeps what a run asks for; keeping more is fine.

        Raises:
            CliError: It keeps less.
        """
        if asked == "fsync" and self.durability != "fsync":
            raise CliError(
                f'durability = "fsync", but the store at {self.home_shard.address} runs with '
                f'"{self.durability}": start its cluster with --durability fsync, or set '
                'durability = "process"'
            )


@asynccontextmanager
async def connect_cluster(addresses: Addresses) -> AsyncIterator[Clients]:
    """Clients of a running cluster.

    Raises:
        CliError: No orchestrator was named.
        UnavailableError: Nobody answers.
    """
    if not addresses.orchestrator:
        raise CliError("--cluster: name the orchestrator too: --cluster orchestrator=HOST:PORT")
    async with (
        connect_store(addresses.store) as store,
        OrchestratorClient.connect(addresses.orchestrator, patience_s=_PATIENCE_S) as orchestrator,
    ):
        stats = await store.get_stats()
        home = common_pb2.ShardAddress(name=stats.shard, address=addresses.store)
        yield Clients(store, orchestrator, home, stats.durability)
