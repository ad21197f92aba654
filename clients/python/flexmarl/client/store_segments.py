"""State segments of one store: room to publish, leases to read, copies from other nodes.

`set` and `get` move named buffers by key; below them are Allocate, Seal, Open and Close.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Self

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.api.meg_store.v1.meg_store_pb2_grpc import MegStoreServiceStub
from flexmarl.client.base import PATIENCE_S, ServiceClient
from flexmarl.client.buffers import Buffer, BufferSpec, lay_out
from flexmarl.client.channel import Channel, connect
from flexmarl.client.errors import UnavailableError
from flexmarl.client.mappings import KeptMappings
from flexmarl.client.request import new_request_id
from flexmarl.client.segments import Held, SegmentReader, SegmentWriter
from flexmarl.core.errors import DomainError


class StoreSegments(ServiceClient):
    """The part of a store's client that moves state; see `StoreClient`."""

    STUB = MegStoreServiceStub
    DEADLINE_S = 30.0
    # A call that takes long is not repeated: it may be at work on what it was asked for.
    REPEATED = (UnavailableError,)

    def __init__(
        self,
        channel: Channel,
        *,
        patience_s: float = PATIENCE_S,
        owns_channel: bool = False,
        shard: str = "",
    ) -> None:
        super().__init__(channel, patience_s=patience_s, owns_channel=owns_channel)
        self.shard = ""
        if shard:
            self.name_shard(shard)
        self._mappings = KeptMappings()
        self._read_mappings = KeptMappings(writable=False)

    @classmethod
    def connect(cls, address: str, *, patience_s: float = PATIENCE_S, shard: str = "") -> Self:
        """Client of the store at `host:port`; it connects on the first call."""
        channel = connect(address, default_deadline_s=cls.DEADLINE_S)
        return cls(channel, patience_s=patience_s, owns_channel=True, shard=shard)

    def name_shard(self, shard: str) -> None:
        """Say which shard this is: failures name it."""
        self.shard = shard
        self.name = f"store shard {shard!r} at {self.address}"
        self.labels = {"shard": shard}

    async def close(self) -> None:
        """Close the connection and unmap what was kept for the next segments."""
        self._mappings.close()
        self._read_mappings.close()
        await super().close()

    async def set(
        self,
        run_id: str,
        key: str,
        buffers: Iterable[Buffer],
        *,
        tier: pb.SegmentTier.ValueType = pb.SEGMENT_TIER_MEMORY,
        attributes: Mapping[str, str] | None = None,
    ) -> common_pb2.ObjectRef:
        """Publish named buffers under a key; they are immutable from then on.

        Raises:
            ExistsError: CONTENT_MISMATCH, the key is taken.
        """
        buffers = tuple(buffers)
        specs = [buffer.spec for buffer in buffers]
        async with self.allocate_segment(
            run_id, key, specs, tier=tier, attributes=attributes
        ) as writer:
            for buffer in buffers:
                writer.buffers[buffer.name].data[:] = buffer.data
        assert writer.object is not None
        return writer.object

    def get(self, run_id: str, key: str, *, holder: str = "client") -> Held[SegmentReader]:
        """Named buffers by key: `async with store.get(run_id, key) as reader: reader.buffers`."""
        return self.open_segment(run_id, key, holder=holder)

    def allocate_segment(
        self,
        run_id: str,
        key: str,
        specs: Sequence[BufferSpec],
        *,
        tier: pb.SegmentTier.ValueType = pb.SEGMENT_TIER_MEMORY,
        attributes: Mapping[str, str] | None = None,
    ) -> Held[SegmentWriter]:
        """Room for buffers, mapped for writing: `async with store.allocate_segment(...) as writer`.

        At the end of the block the segment is sealed. Awaited instead, it is the caller's to seal.
        """
        return Held(
            self._allocate(run_id, key, specs, tier=tier, attributes=dict(attributes or {}))
        )

    async def _allocate(
        self,
        run_id: str,
        key: str,
        specs: Sequence[BufferSpec],
        *,
        tier: pb.SegmentTier.ValueType,
        attributes: Mapping[str, str],
    ) -> SegmentWriter:
        layout = lay_out(specs)
        response: pb.AllocateSegmentResponse = await self._call(
            "AllocateSegment",
            pb.AllocateSegmentRequest(
                request_id=new_request_id(),
                run_id=run_id,
                key=key,
                size_bytes=layout.size_bytes,
                tier=tier,
            ),
        )

        async def seal(
            buffers: Sequence[pb.NamedBuffer], checksum: str, more: Mapping[str, str]
        ) -> common_pb2.ObjectRef:
            return await self.seal_segment(
                run_id, key, buffers, checksum=checksum, attributes={**attributes, **more}
            )

        return SegmentWriter(response, layout.buffers, seal, self._mappings)

    async def seal_segment(
        self,
        run_id: str,
        key: str,
        buffers: Iterable[pb.NamedBuffer],
        *,
        checksum: str = "",
        attributes: Mapping[str, str] | None = None,
    ) -> common_pb2.ObjectRef:
        """Publish a segment that somebody filled through its path."""
        request = pb.SealSegmentRequest(
            request_id=new_request_id(),
            run_id=run_id,
            key=key,
            buffers=buffers,
            checksum=checksum,
            attributes=attributes,
        )
        response: pb.SealSegmentResponse = await self._call("SealSegment", request)
        return response.object

    def open_segment(self, run_id: str, key: str, *, holder: str) -> Held[SegmentReader]:
        """A sealed segment, mapped under a lease: `async with store.open_segment(...) as reader`.

        Awaited instead, the reader is the caller's to close.

        Raises:
            DomainError: SEGMENT_NOT_FOUND, also when its file cannot be opened on this node;
                CHECKSUM_MISMATCH when that is cut short.
        """
        return Held(self._open(run_id, key, holder=holder))

    async def _open(self, run_id: str, key: str, *, holder: str) -> SegmentReader:
        request = pb.OpenSegmentRequest(run_id=run_id, key=key, holder=holder)
        response: pb.OpenSegmentResponse = await self._call("OpenSegment", request)
        try:
            return SegmentReader(response, self.close_segment, self._read_mappings)
        except DomainError:  # its file is not on this node, or not whole
            await self.close_segment(response.lease_id)
            raise

    async def close_segment(self, lease_id: str) -> None:
        """Give a lease back."""
        await self._call("CloseSegment", pb.CloseSegmentRequest(lease_id=lease_id))

    async def read_segment(
        self, run_id: str, key: str, *, holder: str = "client"
    ) -> AsyncGenerator[pb.OpenSegmentResponse | bytes, None]:
        """A segment as a stream: its layout first, then the bytes of its file in order.

        A stream that breaks is not taken up again.

        Raises:
            UnavailableError: The store does not answer; it is named.
        """
        request = pb.ReadSegmentRequest(run_id=run_id, key=key, holder=holder)
        try:
            async for response in self._stub.ReadSegment(request):
                yield response.segment if response.HasField("segment") else response.chunk
        except UnavailableError as error:
            raise self._no_answer(0.0, error) from None

    async def fetch_segment(
        self, run_id: str, key: str, *, source: common_pb2.ShardAddress
    ) -> pb.FetchSegmentResponse:
        """Have this store bring a segment of another one here, under the same key."""
        request = pb.FetchSegmentRequest(
            request_id=new_request_id(), run_id=run_id, key=key, source=source
        )
        response: pb.FetchSegmentResponse = await self._call("FetchSegment", request)
        return response
