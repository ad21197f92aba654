"""The MEG Store's typed client.

One method per RPC, with messages of the contract in and out. A request id is made once per logical
call, and every call is repeated while the store is UNAVAILABLE, up to `patience_s`: callers survive
a restart of the store without noticing. Watches resume at their cursor.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.channel import StreamCall
from flexmarl.client.errors import NotFoundError, UnavailableError
from flexmarl.client.request import new_request_id
from flexmarl.client.store_segments import StoreSegments
from flexmarl.core.watch_cursor import read_cursor

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Watched:
    """Events of a run, and where to resume after them.

    Attributes:
        events: In the order of their shard; those of different shards have none.
        cursor: Opaque.
    """

    events: Sequence[pb.Event]
    cursor: str


class StoreClient(StoreSegments):
    """Client of one store shard.

    Args:
        channel: From `connect`.
        patience_s: How long a store that does not answer is waited for.
        owns_channel: Close the channel with the client.
        shard: Name of the shard, for messages; empty where it is not known.
    """

    async def wait_ready(self, *, timeout_s: float = 30.0) -> None:
        """Wait until the store answers.

        Raises:
            UnavailableError: After `timeout_s`.
        """
        await self._call("GetStats", pb.GetStatsRequest(), patience_s=timeout_s)

    # Runs and terms

    async def create_run(
        self, run: graph_pb2.Run, *, request_id: str | None = None
    ) -> graph_pb2.Run:
        """Store a run; the same run again is answered."""
        request = pb.CreateRunRequest(request_id=request_id or new_request_id(), run=run)
        response: pb.CreateRunResponse = await self._call("CreateRun", request)
        return response.run

    async def get_run(self, run_id: str) -> graph_pb2.Run:
        """The run, its configuration included."""
        response: pb.GetRunResponse = await self._call("GetRun", pb.GetRunRequest(run_id=run_id))
        return response.run

    async def list_runs(self) -> list[graph_pb2.Run]:
        """All runs, newest first, without their configuration."""
        runs: list[graph_pb2.Run] = []
        token = ""
        while True:
            request = pb.ListRunsRequest(page_token=token)
            response: pb.ListRunsResponse = await self._call("ListRuns", request)
            runs.extend(response.runs)
            token = response.next_page_token
            if not token:
                return runs

    async def delete_run(self, run_id: str) -> None:
        """Remove an ended run and all below it; one that is not there is fine.

        Raises:
            RefusedError: STATE_TRANSITION_REFUSED while it is driven.
        """
        request = pb.DeleteRunRequest(request_id=new_request_id(), run_id=run_id)
        with suppress(NotFoundError):
            await self._call("DeleteRun", request)

    async def return_to_whole(self, run_id: str, *, term: int) -> pb.ReturnToWholeResponse:
        """Make the newest version whose segments are all there the newest one.

        Raises:
            NotFoundError: SEGMENT_NOT_FOUND: no version is whole.
        """
        request = pb.ReturnToWholeRequest(request_id=new_request_id(), run_id=run_id, term=term)
        response: pb.ReturnToWholeResponse = await self._call("ReturnToWhole", request)
        return response

    async def lose_shard(
        self, run_id: str, shard: str, *, term: int = 0, groups: Iterable[graph_pb2.Group] = ()
    ) -> graph_pb2.Run:
        """Record that a shard of a run is lost, and which groups of the open batch went with it.

        Raises:
            NotFoundError: SHARD_NOT_FOUND.
            InvalidError: It is the home shard.
        """
        request = pb.LoseShardRequest(
            request_id=new_request_id(), run_id=run_id, shard=shard, term=term, groups=groups
        )
        response: pb.LoseShardResponse = await self._call("LoseShard", request)
        return response.run

    async def update_run_status(
        self,
        run_id: str,
        status: common_pb2.RunStatus.ValueType,
        *,
        term: int,
        failure: common_pb2.Failure | None = None,
        config_json: bytes = b"",
        shards: Iterable[common_pb2.ShardAddress] = (),
    ) -> graph_pb2.Run:
        """Move a run to a state; with another configuration, or addresses of shards, if given."""
        request = pb.UpdateRunStatusRequest(
            request_id=new_request_id(),
            run_id=run_id,
            term=term,
            status=status,
            failure=failure,
            config_json=config_json,
            shards=shards,
        )
        response: pb.UpdateRunStatusResponse = await self._call("UpdateRunStatus", request)
        return response.run

    async def acquire_term(self, run_id: str, scope: str, *, holder: str) -> int:
        """Raise the term of a scope (`core.fencing`); older holders are refused from then on."""
        request = pb.AcquireTermRequest(
            request_id=new_request_id(), run_id=run_id, scope=scope, holder=holder
        )
        response: pb.AcquireTermResponse = await self._call("AcquireTerm", request)
        return response.term

    # Graph

    async def write_graph(
        self,
        run_id: str,
        *,
        term: int,
        groups: Iterable[graph_pb2.Group] = (),
        samples: Iterable[graph_pb2.Sample] = (),
        vertices: Iterable[graph_pb2.Vertex] = (),
        request_id: str | None = None,
    ) -> pb.WriteGraphResponse:
        """Write groups, samples and ended vertices in one atomic write."""
        request = pb.WriteGraphRequest(
            request_id=request_id or new_request_id(),
            run_id=run_id,
            term=term,
            groups=groups,
            samples=samples,
            vertices=vertices,
        )
        response: pb.WriteGraphResponse = await self._call("WriteGraph", request)
        return response

    async def close_groups(
        self, run_id: str, closures: Iterable[pb.GroupClosure], *, term: int
    ) -> None:
        """End groups, release and void their rows, in one atomic write."""
        request = pb.CloseGroupsRequest(
            request_id=new_request_id(), run_id=run_id, term=term, closures=closures
        )
        await self._call("CloseGroups", request)

    async def void_rows(self, run_id: str, rows: Iterable[pb.VoidedRow], *, term: int) -> None:
        """Give rows a reason not to be trained on."""
        request = pb.VoidRowsRequest(
            request_id=new_request_id(), run_id=run_id, term=term, rows=rows
        )
        await self._call("VoidRows", request)

    async def write_columns(
        self, run_id: str, writes: Iterable[pb.ColumnWrite], *, term: int
    ) -> None:
        """Give stored rows values of declared columns."""
        request = pb.WriteColumnsRequest(
            request_id=new_request_id(), run_id=run_id, term=term, writes=writes
        )
        await self._call("WriteColumns", request)

    async def get_vertices(
        self,
        run_id: str,
        rows: Iterable[common_pb2.VertexRef],
        *,
        view: pb.VertexView.ValueType = pb.VERTEX_VIEW_FULL,
    ) -> Sequence[graph_pb2.Vertex]:
        """Rows by reference, in order."""
        request = pb.GetVerticesRequest(run_id=run_id, rows=rows, view=view)
        response: pb.GetVerticesResponse = await self._call("GetVertices", request)
        return response.vertices

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
        """All vertices that match a filter, page by page, sorted as asked."""
        request = pb.ListVerticesRequest(
            run_id=run_id,
            filter=chosen or pb.VertexFilter(),
            view=view,
            page_size=page_size,
            order=order,
            descending=descending,
        )
        while True:
            response: pb.ListVerticesResponse = await self._call("ListVertices", request)
            for vertex in response.vertices:
                yield vertex
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token

    async def list_claimable(
        self, run_id: str, policy: str, *, max_rows: int = 0, max_tokens: int = 0
    ) -> pb.ListClaimableResponse:
        """Rows of a policy that a micro-batch may take, those of the oldest group first."""
        request = pb.ListClaimableRequest(
            run_id=run_id, policy=policy, max_rows=max_rows, max_tokens=max_tokens
        )
        response: pb.ListClaimableResponse = await self._call("ListClaimable", request)
        return response

    async def list_samples(
        self,
        run_id: str,
        *,
        batch: int | None = None,
        group_id: str = "",
        evaluation: bool = False,
    ) -> list[graph_pb2.Sample]:
        """All samples of a batch or group, by id; or of the evaluation of the version `batch`."""
        samples: list[graph_pb2.Sample] = []
        request = pb.ListSamplesRequest(
            run_id=run_id, batch=batch, group_id=group_id, evaluation=evaluation
        )
        while True:
            response: pb.ListSamplesResponse = await self._call("ListSamples", request)
            samples.extend(response.samples)
            if not response.next_page_token:
                return samples
            request.page_token = response.next_page_token

    async def list_groups(self, run_id: str, *, batch: int | None = None) -> list[graph_pb2.Group]:
        """All groups of a batch, by id."""
        groups: list[graph_pb2.Group] = []
        request = pb.ListGroupsRequest(run_id=run_id, batch=batch)
        while True:
            response: pb.ListGroupsResponse = await self._call("ListGroups", request)
            groups.extend(response.groups)
            if not response.next_page_token:
                return groups
            request.page_token = response.next_page_token

    async def get_sample_graph(
        self,
        run_id: str,
        sample_id: str,
        *,
        view: pb.VertexView.ValueType = pb.VERTEX_VIEW_META,
        critical_path: bool = False,
    ) -> pb.GetSampleGraphResponse:
        """A sample with its vertices in topological order."""
        request = pb.GetSampleGraphRequest(
            run_id=run_id, sample_id=sample_id, view=view, critical_path=critical_path
        )
        response: pb.GetSampleGraphResponse = await self._call("GetSampleGraph", request)
        return response

    async def get_neighbourhood(
        self,
        run_id: str,
        vertex_id: str,
        *,
        hops: int = 1,
        direction: pb.EdgeDirection.ValueType = pb.EDGE_DIRECTION_UNSPECIFIED,
        view: pb.VertexView.ValueType = pb.VERTEX_VIEW_META,
    ) -> Sequence[graph_pb2.Vertex]:
        """A vertex with those within some edges of it, in topological order."""
        request = pb.GetNeighbourhoodRequest(
            run_id=run_id, vertex_id=vertex_id, hops=hops, direction=direction, view=view
        )
        response: pb.GetNeighbourhoodResponse = await self._call("GetNeighbourhood", request)
        return response.vertices

    async def describe_agents(
        self, run_id: str, *, batch: int | None = None
    ) -> pb.DescribeAgentsResponse:
        """Calls, edges, tokens and time per agent, over a batch or the whole run."""
        request = pb.DescribeAgentsRequest(run_id=run_id, batch=batch)
        response: pb.DescribeAgentsResponse = await self._call("DescribeAgents", request)
        return response

    async def count_vertices(
        self, run_id: str, *, batch: int, batch_attempt: int, consumed: Iterable[str]
    ) -> pb.CountVerticesResponse:
        """The account of a batch: finished = consumed + void."""
        request = pb.CountVerticesRequest(
            run_id=run_id,
            batch=batch,
            batch_attempt=batch_attempt,
            consumed_micro_batch_ids=consumed,
        )
        response: pb.CountVerticesResponse = await self._call("CountVertices", request)
        return response

    async def watch(
        self,
        run_id: str,
        *,
        after: str = "",
        kinds: Collection[pb.EventKind.ValueType] = (),
    ) -> AsyncGenerator[Watched, None]:
        """Events of a run after a cursor, without gap and without end.

        What comes without events is a sign of life. A broken or silent stream is opened again at
        the last cursor; after `patience_s` without a response UNAVAILABLE is raised. Waits for
        events; freed by the store, or by closing the iterator.

        Args:
            run_id: Run.
            after: Cursor of an earlier watch; empty: from the oldest event that is kept.
            kinds: Kinds of interest; empty means all.

        Raises:
            OutOfRangeError: The events after the cursor are not kept any more; its metadata gives
                the cursor to start from as `restart`.
        """
        (position,) = read_cursor(after, ("",)).values()

        def open_stream() -> StreamCall:
            call: StreamCall = self._stub.Watch(
                pb.WatchRequest(run_id=run_id, after_cursor=position, kinds=kinds)
            )
            return call

        async with aclosing(self._follow(open_stream)) as responses:
            async for response in responses:
                position = max(position, response.cursor)
                yield Watched(response.events, str(position))

    # Training

    async def close_subgraph(
        self, run_id: str, subgraphs: Iterable[pb.ClosedSubgraph], *, term: int
    ) -> None:
        """Mark that no row of these (batch, policy) can come any more."""
        request = pb.CloseSubgraphRequest(
            request_id=new_request_id(), run_id=run_id, term=term, subgraphs=subgraphs
        )
        await self._call("CloseSubgraph", request)

    async def create_micro_batch(self, run_id: str, micro_batch: graph_pb2.MicroBatch) -> None:
        """Write a record; it owns its rows from then on."""
        request = pb.CreateMicroBatchRequest(
            request_id=new_request_id(), run_id=run_id, micro_batch=micro_batch
        )
        await self._call("CreateMicroBatch", request)

    async def mark_rows(
        self,
        run_id: str,
        micro_batch_id: str,
        rows: Iterable[common_pb2.VertexRef],
        *,
        term: int,
    ) -> None:
        """Mark the rows of a record that live on this shard."""
        request = pb.MarkRowsRequest(
            request_id=new_request_id(),
            run_id=run_id,
            term=term,
            micro_batch_id=micro_batch_id,
            rows=rows,
        )
        await self._call("MarkRows", request)

    async def list_micro_batches(
        self, run_id: str, *, batch: int, policy: str = ""
    ) -> list[graph_pb2.MicroBatch]:
        """All records of a batch in order of creation."""
        records: list[graph_pb2.MicroBatch] = []
        request = pb.ListMicroBatchesRequest(run_id=run_id, batch=batch, policy=policy)
        while True:
            response: pb.ListMicroBatchesResponse = await self._call("ListMicroBatches", request)
            records.extend(response.micro_batches)
            if not response.next_page_token:
                return records
            request.page_token = response.next_page_token

    async def save_state(self, run_id: str, state: graph_pb2.StateRecord) -> None:
        """Write a policy's state record."""
        request = pb.SaveStateRequest(request_id=new_request_id(), run_id=run_id, state=state)
        await self._call("SaveState", request)

    async def get_state(
        self, run_id: str, policy: str, *, version: int | None = None
    ) -> graph_pb2.StateRecord | None:
        """The record of a policy at a version, or its newest."""
        request = pb.GetStateRequest(run_id=run_id, policy=policy, version=version)
        response: pb.GetStateResponse = await self._call("GetState", request)
        return response.state if response.HasField("state") else None

    async def commit(
        self, run_id: str, manifest: graph_pb2.Manifest, *, expected_version: int | None
    ) -> None:
        """Write the next manifest; None expects that there is no version yet.

        Raises:
            ConflictError: VERSION_MISMATCH, TERM_STALE.
        """
        request = pb.CommitRequest(
            request_id=new_request_id(),
            run_id=run_id,
            expected_version=expected_version,
            manifest=manifest,
        )
        await self._call("Commit", request)

    async def get_manifest(
        self, run_id: str, *, version: int | None = None
    ) -> graph_pb2.Manifest | None:
        """The manifest of a version, or the newest."""
        request = pb.GetManifestRequest(run_id=run_id, version=version)
        response: pb.GetManifestResponse = await self._call("GetManifest", request)
        return response.manifest if response.HasField("manifest") else None

    async def list_manifests(
        self, run_id: str, *, from_version: int = 0
    ) -> list[graph_pb2.Manifest]:
        """Manifests from a version on, oldest first."""
        manifests: list[graph_pb2.Manifest] = []
        while True:
            request = pb.ListManifestsRequest(run_id=run_id, from_version=from_version)
            response: pb.ListManifestsResponse = await self._call("ListManifests", request)
            manifests.extend(response.manifests)
            if not response.manifests:
                return manifests
            from_version = response.manifests[-1].version + 1

    async def find_whole_versions(self, run_id: str) -> pb.FindWholeVersionsResponse:
        """Newest versions whose state is all there: anywhere, and on disk."""
        request = pb.FindWholeVersionsRequest(run_id=run_id)
        response: pb.FindWholeVersionsResponse = await self._call("FindWholeVersions", request)
        return response

    @asynccontextmanager
    async def pinned_version(
        self, run_id: str, version: int, *, holder: str, ttl_s: float
    ) -> AsyncIterator[None]:
        """Keep a version's state for the block, at most `ttl_s`.

        Raises:
            NotFoundError: It is not kept any more.
        """
        request = pb.PinVersionRequest(
            request_id=new_request_id(), run_id=run_id, version=version, holder=holder, ttl_s=ttl_s
        )
        response: pb.PinVersionResponse = await self._call("PinVersion", request)
        try:
            yield
        finally:
            unpin = pb.UnpinVersionRequest(
                request_id=new_request_id(), run_id=run_id, pin_id=response.pin_id
            )
            await self._call("UnpinVersion", unpin)

    # Objects

    async def put_object(
        self, source: bytes | Path, *, run_id: str = "", key: str = ""
    ) -> common_pb2.ObjectRef:
        """Store bytes or a file under a key, by default `sha256:<hex>` of the content.

        Content that is there already is not sent again.
        """
        size_bytes, checksum = await asyncio.to_thread(_size_and_checksum, source)
        known = await self.stat_object(key or checksum)
        if known is not None and known.checksum == checksum:
            return known
        header = pb.PutObjectHeader(
            request_id=new_request_id(),
            run_id=run_id,
            key=key,
            size_bytes=size_bytes,
            checksum=checksum,
        )

        async def once() -> pb.PutObjectResponse:
            response: pb.PutObjectResponse = await self._stub.PutObject(_upload(header, source))
            return response

        return (await self._patiently(once)).object

    async def stat_object(self, key: str) -> common_pb2.ObjectRef | None:
        """Reference to an object; None when it is not there."""
        request = pb.StatObjectRequest(key=key)
        response: pb.StatObjectResponse = await self._call("StatObject", request)
        return response.object if response.HasField("object") else None

    async def get_object(self, key: str, *, offset: int = 0, length: int = 0) -> bytes:
        """An object, or a range of it; length 0 means to the end."""

        async def once() -> bytes:
            request = pb.GetObjectRequest(key=key, offset=offset, length=length)
            return b"".join([response.chunk async for response in self._stub.GetObject(request)])

        return await self._patiently(once)

    async def download_object(self, key: str, path: Path) -> common_pb2.ObjectRef:
        """Write an object to a file, piece by piece; the file appears when it is whole."""
        ref = await self.stat_object(key)
        temporary = path.with_name(f".{path.name}.{new_request_id()[:8]}")
        try:
            with temporary.open("wb") as file:
                size_bytes = 0 if ref is None else ref.size_bytes
                for offset in range(0, size_bytes, 64 * CHUNK_BYTES):
                    length = min(64 * CHUNK_BYTES, size_bytes - offset)
                    file.write(await self.get_object(key, offset=offset, length=length))
            if ref is None:  # raises the store's own error
                await self.get_object(key)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        assert ref is not None
        return ref

    @asynccontextmanager
    async def holding_writes(self, hold_id: str) -> AsyncIterator[None]:
        """Keep the shard's mutations waiting for the block, a few seconds at most.

        Raises:
            RefusedError: Somebody else holds them.
            UnavailableError: The store does not answer; it is named.
        """
        call: StreamCall = self._stub.HoldWrites(pb.HoldWritesRequest(hold_id=hold_id))
        try:
            try:
                await call.read()
            except UnavailableError as error:
                raise self._no_answer(0.0, error) from None
            yield
        finally:
            call.cancel()

    async def create_snapshot(self, name: str, *, hold_id: str = "") -> pb.CreateSnapshotResponse:
        """Copy the shard, while it serves, into its folder of snapshots.

        Args:
            name: Name of the snapshot.
            hold_id: Of `holding_writes`, when other shards are copied with this one.
        """
        request = pb.CreateSnapshotRequest(request_id=new_request_id(), name=name, hold_id=hold_id)
        response: pb.CreateSnapshotResponse = await self._call("CreateSnapshot", request)
        return response

    async def get_stats(self) -> pb.GetStatsResponse:
        """Sizes, queues and tiers of the store."""
        response: pb.GetStatsResponse = await self._call("GetStats", pb.GetStatsRequest())
        return response


def _size_and_checksum(source: bytes | Path) -> tuple[int, str]:
    if isinstance(source, Path):
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return file.tell(), f"sha256:{digest.hexdigest()}"
    return len(source), f"sha256:{hashlib.sha256(source).hexdigest()}"


async def _upload(
    header: pb.PutObjectHeader, source: bytes | Path
) -> AsyncIterator[pb.PutObjectRequest]:
    yield pb.PutObjectRequest(header=header)
    if isinstance(source, Path):
        with source.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield pb.PutObjectRequest(chunk=chunk)
        return
    for start in range(0, len(source), CHUNK_BYTES):
        yield pb.PutObjectRequest(chunk=source[start : start + CHUNK_BYTES])
