"""Clients of a cluster that a run is trained on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.cli.cluster.attach import Addresses
from flexmarl.cli.connect import connect_store
from flexmarl.cli.errors import CliError
from flexmarl.client.orchestrator import OrchestratorClient
from flexmarl.client.store import StoreClient
from flexmarl.runtime.run_config import RunConfig

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
        _check_durability(self.home_shard.address, offered=self.durability, asked=asked)


async def find_shards(config: RunConfig) -> list[common_pb2.ShardAddress]:
    """The further store shards of a run, by the names that they give themselves.

    Raises:
        CliError: One keeps less than the run asks for.
        UnavailableError: One does not answer.
    """
    shards = []
    for address in config.store_shards:
        async with connect_store(address) as store:
            stats = await store.get_stats()
        _check_durability(address, offered=stats.durability, asked=config.durability)
        shards.append(common_pb2.ShardAddress(name=stats.shard, address=address))
    return shards


def _check_durability(address: str, *, offered: str, asked: str) -> None:
    if asked == "fsync" and offered != "fsync":
        raise CliError(
            f'durability = "fsync", but the store at {address} runs with '
            f'"{offered}": start its cluster with --durability fsync, or set '
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
