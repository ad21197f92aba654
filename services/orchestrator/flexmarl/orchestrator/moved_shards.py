"""Store shards that answer elsewhere than where their run was stored with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexmarl.api.common.v1 import common_pb2
from flexmarl.client.store import StoreClient
from flexmarl.core.errors import DomainError, ErrorReason


async def moved_shards(
    stored: Sequence[common_pb2.ShardAddress], addresses: Iterable[str], *, patience_s: float
) -> list[common_pb2.ShardAddress]:
    """The run's shards beside its home, each where it answers now.

    Shards are known by the names that they give themselves; one that no address is given for is
    where it was.

    Args:
        stored: The shards as the run has them.
        addresses: Where shards are now.
        patience_s: How long one that does not answer is waited for.

    Raises:
        DomainError: SHARD_NOT_FOUND, a store there is none of the run's; UNAVAILABLE.
    """
    now: dict[str, str] = {}
    for address in addresses:
        async with StoreClient.connect(address, patience_s=patience_s) as store:
            name = (await store.get_stats()).shard
        if name not in [shard.name for shard in stored]:
            names = ", ".join(shard.name for shard in stored) or "none"
            raise DomainError(
                ErrorReason.SHARD_NOT_FOUND,
                f"store_shards: the store at {address} is shard {name!r}; beside its home, the run "
                f"has: {names}. Its list of shards is fixed, only their addresses may change",
                {"shard": name},
            )
        now[name] = address
    return [
        common_pb2.ShardAddress(
            name=shard.name, address=now.get(shard.name, shard.address), lost=shard.lost
        )
        for shard in stored
    ]
