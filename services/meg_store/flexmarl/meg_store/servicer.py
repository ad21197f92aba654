"""MegStoreService: parse, call a room, convert.

Handlers get the request as it came (`Call`: message and bytes, for the hash behind a request id)
and may answer with serialised bytes, so that stored rows pass through without being parsed.
"""

# ruff: noqa: N802 - handlers are named as in the contract

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store import wire
from flexmarl.meg_store.database import Draft
from flexmarl.meg_store.paging import MAX_PAGE
from flexmarl.meg_store.segment_fetch import read_pieces
from flexmarl.meg_store.shard import Shard
from flexmarl.meg_store.written_graph import WRITTEN_GRAPH, malformed

SERVICE = "flexmarl.api.meg_store.v1.MegStoreService"
_MAX_LIST_MANIFESTS = 1000

_READS_AS: Mapping[str, type[Message]] = MappingProxyType({"WriteGraph": WRITTEN_GRAPH})
"""Methods whose requests are read by another class than the contract's, of the same wire form."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it came."""

    message: Any
    payload: bytes


class Servicer:
    """The methods of the service; NOT_READY until a shard is open."""

    def __init__(self) -> None:
        self._shard: Shard | None = None

    def open(self, shard: Shard) -> None:
        """Serve from a shard."""
        self._shard = shard

    @property
    def shard(self) -> Shard:
        """The open shard.

        Raises:
            DomainError: NOT_READY.
        """
        if self._shard is None:
            raise DomainError(ErrorReason.NOT_READY, "the store is still opening")
        return self._shard

    # Runs and terms

    async def CreateRun(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.runs.create, run_id=call.message.run.run_id)

    async def GetRun(self, call: Call, _: Context) -> pb.GetRunResponse:
        """See the contract."""
        return pb.GetRunResponse(run=self.shard.runs.read(call.message.run_id))

    async def ListRuns(self, call: Call, _: Context) -> pb.ListRunsResponse:
        """See the contract."""
        ids = self.shard.runs.ids()
        token = call.message.page_token
        if token and token not in ids:
            raise ValueError("page_token is not of this query")
        start = ids.index(token) + 1 if token else 0
        page = ids[start : start + min(call.message.page_size or 100, MAX_PAGE)]
        more = start + len(page) < len(ids)
        return pb.ListRunsResponse(
            runs=[self.shard.runs.describe(run_id) for run_id in page],
            next_page_token=page[-1] if more and page else "",
        )

    async def UpdateRunStatus(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.runs.update_status)

    async def LoseShard(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.loss.lose, sync=True)

    async def ReturnToWhole(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.returns.to_whole, sync=True)

    async def DeleteRun(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self.shard.deletion.delete(call.message, call.payload)

    async def AcquireTerm(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.runs.acquire_term, sync=True)

    # Graph

    async def WriteGraph(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        write = self.shard.graph.begin(call.message)
        return await self.shard.database.mutate(
            call.message.run_id,
            call.message.request_id,
            call.payload,
            write.decide,
            prepare=write.in_slices(),
        )

    async def CloseGroups(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.closures.close_groups)

    async def VoidRows(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.closures.void_rows)

    async def WriteColumns(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.columns.write)

    async def CloseSubgraph(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.closures.close_subgraph)

    async def GetVertices(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self.shard.queries.get_vertices(call.message)

    async def ListVertices(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self.shard.listing.page(call.message)

    async def ListClaimable(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return self.shard.queries.list_claimable(call.message)

    async def ListSamples(self, call: Call, _: Context) -> pb.ListSamplesResponse:
        """See the contract."""
        return await self.shard.queries.list_samples(call.message)

    async def ListGroups(self, call: Call, _: Context) -> pb.ListGroupsResponse:
        """See the contract."""
        return await self.shard.queries.list_groups(call.message)

    async def GetSampleGraph(self, call: Call, _: Context) -> pb.GetSampleGraphResponse:
        """See the contract."""
        return await self.shard.graph_queries.sample_graph(call.message)

    async def GetNeighbourhood(self, call: Call, _: Context) -> pb.GetNeighbourhoodResponse:
        """See the contract."""
        return await self.shard.graph_queries.neighbourhood(call.message)

    async def DescribeAgents(self, call: Call, _: Context) -> pb.DescribeAgentsResponse:
        """See the contract."""
        return await self.shard.graph_queries.describe_agents(call.message)

    async def CountVertices(self, call: Call, _: Context) -> pb.CountVerticesResponse:
        """See the contract."""
        counts = await self.shard.queries.count_vertices(call.message)
        self.shard.loss.count(call.message, counts)
        return counts

    async def Watch(self, call: Call, _: Context) -> AsyncIterator[bytes]:
        """See the contract; ends with DRAINING when the store stops."""
        shard, request = self.shard, call.message
        shard.runs.require(request.run_id)
        kinds = frozenset(request.kinds)
        if pb.EVENT_KIND_VERTEX in kinds and not shard.runs.describe(request.run_id).vertex_events:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"run {request.run_id!r} was created without vertex_events: watch its samples",
            )
        log = shard.database.events.of(request.run_id)
        log.check_cursor(request.after_cursor)
        cursor = told = request.after_cursor
        told_at = time.monotonic()
        sign_of_life_s = shard.config.sign_of_life_s
        while not shard.database.events.closed:
            shard.runs.require(request.run_id)  # it may be deleted meanwhile
            log.check_cursor(cursor)
            page = log.read(cursor, kinds)
            cursor = page.cursor
            silent_s = time.monotonic() - told_at
            if page.events or silent_s >= sign_of_life_s:
                yield wire.watch_response(page.events, cursor)
                told, told_at = cursor, time.monotonic()
            elif log.published <= cursor:
                await log.wait(cursor, timeout_s=sign_of_life_s - silent_s)
            else:
                await asyncio.sleep(0)  # a long stretch of other kinds must not hold the loop
        if cursor != told:
            yield wire.watch_response((), cursor)
        raise DomainError(ErrorReason.DRAINING, "the store stops; resume at the cursor")

    # Training

    async def CreateMicroBatch(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.micro_batches.create, sync=True)

    async def MarkRows(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.micro_batches.mark)

    async def ListMicroBatches(self, call: Call, _: Context) -> pb.ListMicroBatchesResponse:
        """See the contract."""
        return await self.shard.queries.list_micro_batches(call.message)

    async def SaveState(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.training.save_state, sync=True)

    async def GetState(self, call: Call, _: Context) -> pb.GetStateResponse:
        """See the contract."""
        return pb.GetStateResponse(state=self.shard.training.state(call.message))

    async def Commit(self, call: Call, _: Context) -> bytes:
        """See the contract; waits for checksums that are still being computed."""
        for key in self.shard.training.unfinished_checksums(call.message.manifest):
            await self.shard.wait_checksum(key)
        return await self._mutate(call, self.shard.training.commit, sync=True)

    async def GetManifest(self, call: Call, _: Context) -> pb.GetManifestResponse:
        """See the contract."""
        return pb.GetManifestResponse(manifest=self.shard.training.manifest(call.message))

    async def ListManifests(self, call: Call, _: Context) -> pb.ListManifestsResponse:
        """See the contract."""
        request = call.message
        found = self.shard.training.manifests(
            request.run_id,
            start=request.from_version,
            limit=min(request.page_size or _MAX_LIST_MANIFESTS, _MAX_LIST_MANIFESTS),
        )
        return pb.ListManifestsResponse(manifests=list(found))

    # Objects

    async def PutObject(self, calls: AsyncIterator[Call], _: Context) -> pb.PutObjectResponse:
        """See the contract. The content names the call: repeating it is harmless by itself."""
        first = await anext(aiter(calls), None)
        if first is None or not first.message.HasField("header"):
            raise DomainError(ErrorReason.INVALID_ARGUMENT, "an upload starts with its header")
        header: pb.PutObjectHeader = first.message.header

        async def chunks() -> AsyncIterator[bytes]:
            async for call in calls:
                yield call.message.chunk

        return pb.PutObjectResponse(object=await self.shard.objects.put(header, chunks()))

    async def GetObject(self, call: Call, _: Context) -> AsyncIterator[pb.GetObjectResponse]:
        """See the contract."""
        request = call.message
        record = self.shard.objects.require(request.key)
        yield pb.GetObjectResponse(object=record.ref)
        pieces = self.shard.objects.read(request.key, offset=request.offset, length=request.length)
        async for piece in pieces:
            yield pb.GetObjectResponse(chunk=piece)

    async def StatObject(self, call: Call, _: Context) -> pb.StatObjectResponse:
        """See the contract."""
        record = self.shard.objects.find(call.message.key)
        if record is None:
            return pb.StatObjectResponse()
        return pb.StatObjectResponse(object=record.ref, reference_count=record.reference_count)

    # Segments

    async def AllocateSegment(self, call: Call, _: Context) -> bytes:
        """See the contract; nothing is lost with a segment that is not sealed: it is not synced."""
        segments = self.shard.segments
        file = await self.shard.tiers.make_file(call.message)
        recorded = False

        def build(draft: Draft, request: pb.AllocateSegmentRequest) -> pb.AllocateSegmentResponse:
            nonlocal recorded
            response = segments.allocate(draft, request, file, mapped=True)
            recorded = True
            return response

        try:
            return await self._mutate(call, build, lazy=True)
        finally:
            if not recorded:  # refused, or a repeated call that has its file
                segments.discard(file)

    async def SealSegment(self, call: Call, _: Context) -> bytes:
        """See the contract; the bytes of the disk tier are on disk before the record says so.

        What lies in memory is lost with the host, whether its record is or not: that is synced by
        the write that names the segment, which comes after it.
        """
        on_disk = await self.shard.segments.flush_file(call.message.key)
        return await self._mutate(call, self.shard.segments.seal, lazy=not on_disk)

    async def OpenSegment(self, call: Call, _: Context) -> pb.OpenSegmentResponse:
        """See the contract."""
        return self.shard.segments.open(call.message, now=time.monotonic(), mapped=True)

    async def CloseSegment(self, call: Call, _: Context) -> pb.CloseSegmentResponse:
        """See the contract."""
        self.shard.segments.close(call.message.lease_id)
        return pb.CloseSegmentResponse()

    async def HoldWrites(self, call: Call, _: Context) -> AsyncIterator[pb.HoldWritesResponse]:
        """See the contract; ends with the hold, and the hold with the stream."""
        hold, hold_id = self.shard.database.hold, call.message.hold_id
        hold.begin(hold_id)
        try:
            yield pb.HoldWritesResponse()
            await hold.ended()
        finally:
            hold.end(hold_id)

    async def CreateSnapshot(self, call: Call, _: Context) -> pb.CreateSnapshotResponse:
        """See the contract; the folder, with the request id in it, is what makes it repeatable."""
        return await self.shard.snapshots.create(call.message)

    async def ReadSegment(self, call: Call, _: Context) -> AsyncIterator[pb.ReadSegmentResponse]:
        """See the contract; waits for a checksum that is still being computed."""
        request, segments = call.message, self.shard.segments
        await self.shard.wait_checksum(request.key)
        opened = segments.open(
            pb.OpenSegmentRequest(run_id=request.run_id, key=request.key, holder=request.holder),
            now=time.monotonic(),
        )
        try:
            yield pb.ReadSegmentResponse(segment=opened)
            async for piece in read_pieces(Path(opened.path), opened.object.size_bytes):
                yield pb.ReadSegmentResponse(chunk=piece)
        finally:
            segments.close(opened.lease_id)

    async def FetchSegment(self, call: Call, _: Context) -> pb.FetchSegmentResponse:
        """See the contract. The key names the content: repeating it is harmless by itself."""
        return await self.shard.fetches.fetch(call.message)

    async def FindWholeVersions(self, call: Call, _: Context) -> pb.FindWholeVersionsResponse:
        """See the contract."""
        return self.shard.training.whole_versions(call.message.run_id)

    async def PinVersion(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.training.pin)

    async def UnpinVersion(self, call: Call, _: Context) -> bytes:
        """See the contract."""
        return await self._mutate(call, self.shard.training.unpin)

    async def GetStats(self, _call: Call, _: Context) -> pb.GetStatsResponse:
        """See the contract."""
        config = self.shard.config
        node = self.shard.node
        return pb.GetStatsResponse(
            shard=config.shard,
            numbers=self.shard.numbers(),
            durability=config.durability,
            node_file=str(node.path),
            node_token=node.token,
        )

    async def _mutate(
        self,
        call: Call,
        build: Callable[[Draft, Any], Message],
        *,
        run_id: str | None = None,
        sync: bool = False,
        lazy: bool = False,
    ) -> bytes:
        request = call.message
        return await self.shard.database.mutate(
            request.run_id if run_id is None else run_id,
            request.request_id,
            call.payload,
            lambda draft: build(draft, request),
            sync=sync,
            lazy=lazy,
        )


def add_to_server(servicer: Servicer, server: grpc.aio.Server) -> None:
    """Register the servicer with codecs that keep the request's bytes and pass bytes through."""
    service = pb.DESCRIPTOR.services_by_name["MegStoreService"]
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
    }
    handlers = {
        method.name: make[method.client_streaming, method.server_streaming](
            _checked(getattr(servicer, method.name), streams=method.server_streaming),
            request_deserializer=_reader(
                _READS_AS.get(method.name) or GetMessageClass(method.input_type)
            ),
            response_serializer=_write,
        )
        for method in service.methods
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _checked(handler: Any, *, streams: bool) -> Any:  # noqa: ANN401 - handlers of all shapes
    """Turns refused values (ValueError) and malformed bytes into INVALID_ARGUMENT."""

    async def unary(call: Any, context: Context) -> Any:  # noqa: ANN401
        try:
            _refuse_malformed(call)
            return await handler(call, context)
        except ValueError as error:
            raise DomainError(ErrorReason.INVALID_ARGUMENT, str(error)) from None

    async def stream(call: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ANN401
        _refuse_malformed(call)
        try:
            async for response in handler(call, context):
                yield response
        except ValueError as error:
            raise DomainError(ErrorReason.INVALID_ARGUMENT, str(error)) from None

    return stream if streams else unary


def _refuse_malformed(call: Any) -> None:  # noqa: ANN401 - a Call, or a stream of them
    if isinstance(call, Call) and call.message is None:
        raise malformed()


def _reader(message: type[M]) -> Callable[[bytes], Call]:
    def read(payload: bytes) -> Call:
        try:
            return Call(message.FromString(payload), payload)
        except DecodeError:
            # gRPC would answer INTERNAL for an exception here.
            return Call(None, payload)

    return read


def _write(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()
