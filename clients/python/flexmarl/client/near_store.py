"""Which store shares its memory tier with this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.store import StoreClient
from flexmarl.core.errors import DomainError, ErrorReason


async def find_near(stores: Iterable[StoreClient]) -> StoreClient:
    """The first of these stores that is on this node.

    Raises:
        DomainError: SEGMENT_NOT_FOUND, none is.
        UnavailableError: One before it does not answer.
    """
    names: list[str] = []
    for store in stores:
        stats = await store.get_stats()
        if await asyncio.to_thread(_is_here, stats):
            return store
        names.append(store.shard)
    raise DomainError(
        ErrorReason.SEGMENT_NOT_FOUND,
        f"no store of the run (shards {', '.join(names)}) shares its memory tier with this node: "
        "start one here and name it in the run's list of shards",
        {"shards": ",".join(names)},
    )


def _is_here(stats: pb.GetStatsResponse) -> bool:
    try:
        return bool(stats.node_token) and Path(stats.node_file).read_text() == stats.node_token
    except (OSError, ValueError):
        return False
