"""The store of a run that is spread over shards.

    home shard: the run, terms, records, ledgers, states, manifests, its objects and segments
    a group and all below it: the shard that `core.shard_placement` gives for the group's id

`RunStore` is the home shard's client; what concerns rows it sends where they live, fans out over
all shards and puts together again. With one shard it is `StoreClient` and nothing more. A shard
that does not answer is waited for, and then named: rows are never silently missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing
from typing import Any, Self, TypeVar

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client import shard_answers as answers
from flexmarl.client.base import PATIENCE_S
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.channel import Channel
from flexmarl.client.errors import NotFoundError
from flexmarl.client.near_store import find_near
from flexmarl.client.request import new_request_id
from flexmarl.client.segments import SegmentReader, SegmentWriter
from flexmarl.client.shard_routes import ROUTES
from flexmarl.client.shard_watch import watch_shards
from flexmarl.client.store import StoreClient, Watched
from flexmarl.client.vertex_order import place
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import group_of
from flexmarl.core.shard_placement import Placement, rendezvous

T = TypeVar("T")


class RunStore(StoreClient):
    """Client of a run's shards.

    Args:
        channel: To the home shard.
        patience_s: How long the home shard is waited for when it does not answer.
        owns_channel: Close the channel with the client.
        shard: Name of the home shard.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        patience_s: float = PATIENCE_S,
        owns_channel: bool = False,
        shard: str = "",
    ) -> None:
        super().__init__(channel, patience_s=patience_s, owns_channel=owns_channel, shard=shard)
        self._home = StoreClient(channel, patience_s=patience_s, shard=shard)
        self._placement: Placement | None = None
        self._addresses: dict[str, common_pb2.ShardAddress] = {}
        self._clients: dict[str, StoreClient] = {shard: self._home}
        self._near: StoreClient | None = None

    @classmethod
    def over(
        cls,
        shards: Sequence[common_pb2.ShardAddress],
        *,
        patience_s: float = PATIENCE_S,
        shard_patience_s: float | None = None,
    ) -> Self:
        """Client of a run's shards, the home shard first.

        Args:
            shards: Names and addresses.
            patience_s: How long the home shard is waited for.
            shard_patience_s: How long another one is; None: as long.

        Raises:
            DomainError: INVALID_ARGUMENT, the list is empty or names a shard twice.
        """
        if not shards:
            raise DomainError(ErrorReason.INVALID_ARGUMENT, "no store shard is given")
        store = cls.connect(shards[0].address, patience_s=patience_s, shard=shards[0].name)
        store.use_shards(shards, patience_s=shard_patience_s)
        return store

    def use_shards(
        self,
        shards: Sequence[common_pb2.ShardAddress],
        *,
        patience_s: float | None = None,
    ) -> None:
        """Take the run's list of shards; the first one is the one that this client speaks to.

        Raises:
            DomainError: INVALID_ARGUMENT, the list names a shard twice.
        """
        try:
            lost = frozenset(shard.name for shard in shards if shard.lost)
            self._placement = Placement(tuple(shard.name for shard in shards), lost)
        except ValueError as error:
            raise DomainError(ErrorReason.INVALID_ARGUMENT, f"run.shards: {error}") from None
        home, *others = shards
        self.name_shard(home.name)
        self._home.name_shard(home.name)
        self._addresses = {shard.name: shard for shard in shards}
        clients = {home.name: self._home}
        wait_s = self._patience_s if patience_s is None else patience_s
        for shard in others:
            known = self._clients.get(shard.name)
            clients[shard.name] = known or StoreClient.connect(
                shard.address, patience_s=wait_s, shard=shard.name
            )
        self._clients = clients

    @property
    def addresses(self) -> Sequence[common_pb2.ShardAddress]:
        """The run's shards and where they answer, the home shard first."""
        return tuple(self._addresses.values())

    @property
    def shards(self) -> Mapping[str, StoreClient]:
        """Clients of the shards that are not lost, by name, the home shard first.

        Each speaks to its own shard alone.
        """
        if self._placement is None:
            return self._clients
        return {name: self._clients[name] for name in self._placement.alive}

    @property
    def names(self) -> Sequence[str]:
        """Names of the shards that are not lost, the home shard first."""
        return tuple(self.shards)

    @property
    def lost(self) -> Sequence[str]:
        """Shards that are lost, in the list's order."""
        if self._placement is None:
            return ()
        return tuple(name for name in self._placement.shards if name in self._placement.lost)

    def mark_lost(self, names: Collection[str]) -> None:
        """Ask these shards no more; their groups are placed on the others."""
        shards = [*self._addresses.values()]
        for shard in shards:
            shard.lost = shard.name in names
        self.use_shards(shards)

    def was_on(self, group_id: str, shard: str) -> bool:
        """Whether a group was placed on a lost shard while that one was there."""
        return rendezvous(group_id, tuple(sorted({*self.shards, shard}))) == shard

    def shard_of(self, row_id: str) -> str:
        """Shard of a group, sample or vertex, by its id."""
        if self._placement is None or len(self._clients) == 1:
            return self.shard
        return self._placement.of_row(row_id)

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        await super().close()

    async def wait_ready(self, *, timeout_s: float = 30.0) -> None:
        """Wait until every shard answers.

        Raises:
            UnavailableError: After `timeout_s`, naming the shard.
        """
        await self._everywhere(lambda client: client.wait_ready(timeout_s=timeout_s))

    # Runs

    async def create_run(
        self, run: graph_pb2.Run, *, request_id: str | None = None
    ) -> graph_pb2.Run:
        """Store a run on all its shards; the home shard, which others ask, is the last one."""
        if run.shards:
            self.use_shards(run.shards)
        await self._elsewhere(lambda client: client.create_run(run))
        return await self._home.create_run(run, request_id=request_id)

    async def get_run(self, run_id: str) -> graph_pb2.Run:
        """The run, as its home shard has it; its shards are used where none were given."""
        run = await super().get_run(run_id)
        for shard in run.shards:
            shard.lost = shard.name in run.lost_shards
        if self._placement is None and run.shards:
            self.use_shards(run.shards)
        return run

    async def delete_run(self, run_id: str) -> None:
        """Remove an ended run from all its shards, from the home shard last."""
        try:
            await self.get_run(run_id)
        except NotFoundError:
            return
        await self._elsewhere(lambda client: client.delete_run(run_id))
        await self._home.delete_run(run_id)

    async def create_snapshots(self, name: str) -> list[pb.CreateSnapshotResponse]:
        """Copy every shard under one name, all as they are at one moment.

        Mutations wait on all of them until the tables are copied, a few seconds at most.

        Returns:
            One for each shard, the home shard first.

        Raises:
            ExistsError: A shard has a snapshot of this name.
            RefusedError: Another one is being made, or tables took too long to copy.
            UnavailableError: A shard does not answer; it is named.
        """
        if len(self.shards) == 1:
            return [await self._home.create_snapshot(name)]
        hold_id = new_request_id()
        async with AsyncExitStack() as holds:
            for client in self.shards.values():
                await holds.enter_async_context(client.holding_writes(hold_id))
            made = await self._everywhere(
                lambda client: client.create_snapshot(name, hold_id=hold_id)
            )
        return list(made.values())

    # Rows

    async def mark_rows(
        self,
        run_id: str,
        micro_batch_id: str,
        rows: Iterable[common_pb2.VertexRef],
        *,
        term: int,
    ) -> None:
        """Mark the rows of a record, each on its shard; marks are hints, lost rows need none.

        Those of the home shard were marked by the write of the record.
        """
        done = {self.shard, *self.lost}
        left = [ref for ref in rows if (ref.shard or self.shard_of(ref.vertex_id)) not in done]
        if left:
            await super().mark_rows(run_id, micro_batch_id, left, term=term)

    async def list_vertices(
        self,
        run_id: str,
        chosen: pb.VertexFilter | None = None,
        *,
        view: pb.VertexView.ValueType = pb.VERTEX_VIEW_META,
        page_size: int = 0,
        order: pb.VertexOrder.ValueType = pb.VERTEX_ORDER_ID,
        descending: bool = False,
    ) -> AsyncIterator[graph_pb2.Vertex]:
        """All vertices that match a filter, sorted as asked, over all shards."""
        chosen = chosen or pb.VertexFilter()
        clients = self.shards
        streams = [
            clients[name].list_vertices(
                run_id,
                part,
                view=view,
                page_size=page_size,
                order=order,
                descending=descending,
            )
            for name, part in answers.split_filter(chosen, clients, self.shard_of).items()
        ]
        merged = answers.merge_sorted(
            streams, key=lambda vertex: place(vertex.meta, order), descending=descending
        )
        async for vertex in merged:
            yield vertex

    async def get_sample_graph(
        self,
        run_id: str,
        sample_id: str,
        *,
        view: pb.VertexView.ValueType = pb.VERTEX_VIEW_META,
        critical_path: bool = False,
    ) -> pb.GetSampleGraphResponse:
        """A sample with its vertices in topological order; see `StoreClient.get_sample_graph`."""
        try:
            only = self.shard_of(group_of(sample_id))
        except ValueError:
            only = None  # a prefix: any shard may have what it fits

        async def ask(client: StoreClient) -> pb.GetSampleGraphResponse | None:
            try:
                return await client.get_sample_graph(
                    run_id, sample_id, view=view, critical_path=critical_path
                )
            except NotFoundError as error:
                if only is not None or error.reason is not ErrorReason.NOT_FOUND:
                    raise
                return None

        found = await self._everywhere(ask, only=only)
        return answers.the_only(found.values(), sample_id=sample_id, run_id=run_id)

    async def watch(
        self,
        run_id: str,
        *,
        after: str = "",
        kinds: Collection[pb.EventKind.ValueType] = (),
    ) -> AsyncGenerator[Watched, None]:
        """Events of all shards as they come; see `StoreClient.watch`."""
        clients = self.shards
        if len(clients) == 1:
            watched = self._home.watch(run_id, after=after, kinds=kinds)
        else:
            watched = watch_shards(clients, run_id, after=after, kinds=kinds)
        async with aclosing(watched) as events:
            async for each in events:
                yield each

    # Segments: what records name lies on the home shard, and is mapped on the node of its reader.

    async def _open(self, run_id: str, key: str, *, holder: str) -> SegmentReader:
        near = await self._nearest()
        if near is not self._home:
            await near.fetch_segment(run_id, key, source=self._addresses[self.shard])
        return await near._open(run_id, key, holder=holder)

    async def _allocate(
        self,
        run_id: str,
        key: str,
        specs: Sequence[BufferSpec],
        *,
        tier: pb.SegmentTier.ValueType,
        attributes: Mapping[str, str],
    ) -> SegmentWriter:
        near = await self._nearest()
        writer = await near._allocate(run_id, key, specs, tier=tier, attributes=attributes)
        if near is not self._home:
            source = self._addresses[near.shard]

            async def bring_home() -> common_pb2.ObjectRef:
                return (await self._home.fetch_segment(run_id, key, source=source)).object

            writer.then(bring_home)
        return writer

    async def _nearest(self) -> StoreClient:
        """The store of this node, the home shard's before all others.

        Raises:
            DomainError: SEGMENT_NOT_FOUND, the run has no store here.
        """
        if self._near is None:
            if len(self._clients) == 1:
                self._near = self._home
            else:
                self._near = await find_near(self.shards.values())
        return self._near

    # Routing

    async def _call(
        self,
        method: str,
        request: Any,  # noqa: ANN401 - a message of the contract
        *,
        timeout_s: float | None = None,
        patience_s: float | None = None,
    ) -> Any:  # noqa: ANN401 - a message of the contract
        """Call a method where its rows are; writes are atomic on each shard."""
        route = ROUTES.get(method)
        if route is None or len(self._clients) == 1:
            return await super()._call(method, request, timeout_s=timeout_s, patience_s=patience_s)
        plan = route(request, self)
        clients = self.shards
        unknown = [name for name in plan.parts if name not in clients]
        if unknown:
            raise DomainError(
                ErrorReason.SHARD_NOT_FOUND,
                f"the run has no store shard {unknown[0]!r}, or has lost it",
                {"shard": unknown[0]},
            )
        ask = _all_pages if plan.paged else _ask
        found = await _gather(
            {name: ask(clients[name], method, part) for name, part in plan.parts.items()}
        )
        return plan.merge(found)

    async def _everywhere(
        self, call: Callable[[StoreClient], Coroutine[Any, Any, T]], *, only: str | None = None
    ) -> dict[str, T]:
        clients = self.shards
        return await _gather(
            {name: call(clients[name]) for name in clients if only in (None, name)}
        )

    async def _elsewhere(self, call: Callable[[StoreClient], Coroutine[Any, Any, T]]) -> None:
        others = [client for client in self.shards.values() if client is not self._home]
        await _gather({client.shard: call(client) for client in others})


async def _ask(client: StoreClient, method: str, request: Any) -> Any:  # noqa: ANN401 - messages
    return await client._call(method, request)


async def _all_pages(client: StoreClient, method: str, request: Any) -> Any:  # noqa: ANN401 - messages
    asked, whole = type(request)(), None
    asked.CopyFrom(request)
    while True:
        page = await client._call(method, asked)
        asked.page_token, page.next_page_token = page.next_page_token, ""
        if whole is None:
            whole = page
        else:
            whole.MergeFrom(page)
        if not asked.page_token:
            return whole


async def _gather(calls: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
    """Answers by shard. All are waited for, then the first failure is raised."""
    if len(calls) == 1:
        ((name, call),) = calls.items()
        return {name: await call}
    results = await asyncio.gather(*calls.values(), return_exceptions=True)
    answered: dict[str, T] = {}
    for name, result in zip(calls, results, strict=True):
        if isinstance(result, BaseException):
            raise result
        answered[name] = result
    return answered
