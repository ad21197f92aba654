"""One watch over several shards: their streams side by side, one cursor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import Final

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.errors import OutOfRangeError
from flexmarl.client.store import StoreClient, Watched
from flexmarl.core.watch_cursor import read_cursor, write_cursor

_AHEAD: Final = 4
"""Responses that wait for a slow reader; then its shards wait, and their logs keep the rest."""

_News = tuple[str, Watched | Exception]


async def watch_shards(
    clients: Mapping[str, StoreClient],
    run_id: str,
    *,
    after: str,
    kinds: Collection[pb.EventKind.ValueType],
) -> AsyncGenerator[Watched, None]:
    """Events of all shards; the cursor moves on with each of them.

    Raises:
        OutOfRangeError: A shard has forgotten events; `restart` in its metadata is the cursor of
            all shards to start from.
        UnavailableError: A shard does not answer within its client's patience; it is named.
    """
    positions = read_cursor(after, tuple(clients))
    news: asyncio.Queue[_News] = asyncio.Queue(maxsize=_AHEAD)
    pumps = [
        asyncio.create_task(
            _pump(name, client.watch(run_id, after=str(positions[name]), kinds=kinds), news),
            name=f"watch {run_id} on {name}",
        )
        for name, client in clients.items()
    ]
    try:
        while True:
            name, watched = await news.get()  # freed by any shard, at least by a sign of life
            if isinstance(watched, OutOfRangeError):
                raise _restarting(watched, {**positions}, name)
            if isinstance(watched, Exception):
                raise watched
            positions[name] = int(watched.cursor)
            yield Watched(watched.events, write_cursor(positions))
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    name: str, watched: AsyncGenerator[Watched, None], news: asyncio.Queue[_News]
) -> None:
    try:
        async with aclosing(watched) as events:
            async for each in events:
                await news.put((name, each))
    except Exception as error:  # noqa: BLE001 - raised again by the reader
        await news.put((name, error))


def _restarting(error: OutOfRangeError, positions: dict[str, int], shard: str) -> OutOfRangeError:
    positions[shard] = int(error.metadata.get("restart", "0"))
    metadata = {**error.metadata, "restart": write_cursor(positions), "shard": shard}
    return OutOfRangeError(error.reason, error.message, metadata, error.code)
