"""What a host needs of the run's store: base models by hash, and weights as mapped files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from flexmarl.api.common.v1.common_pb2 import ObjectRef, ShardAddress
from flexmarl.api.meg_store.v1.graph_pb2 import ModelRef, Run
from flexmarl.api.rollout.v1.engine_pb2 import EngineBuffer, EngineLoad
from flexmarl.client.bundle import materialise
from flexmarl.client.segments import SegmentReader
from flexmarl.core.engine_host_events import InstanceWanted, LoadEngine
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.weights_probe import read_probe


class Store(Protocol):
    """The part of the store's client that a host uses."""

    async def get_run(self, run_id: str) -> Run:
        """Read a run."""
        ...

    async def download_object(self, key: str, path: Path) -> ObjectRef:
        """Download an object into a file."""
        ...

    def open_segment(self, run_id: str, key: str, *, holder: str) -> Awaitable[SegmentReader]:
        """A sealed segment under a lease."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


Connect = Callable[[Sequence[ShardAddress]], Store]


class StoreAccess:
    """The store of the current plan's run.

    Args:
        connect: Makes a client of a run's store shards.
        cache_dir: Where base models are unpacked.
        holder: Named with leases.
    """

    def __init__(self, connect: Connect, *, cache_dir: Path, holder: str) -> None:
        self._connect = connect
        self._cache_dir = cache_dir
        self._holder = holder
        self._addresses: tuple[tuple[str, str], ...] = ()
        self._store: Store | None = None
        self._models: dict[tuple[str, str], Path] = {}
        self._resolving = asyncio.Lock()

    async def use(self, shards: list[ShardAddress]) -> None:
        """Talk to these shards from now on, the home shard first."""
        addresses = tuple((shard.name, shard.address) for shard in shards)
        if addresses == self._addresses:
            return
        await self.close()
        self._addresses = addresses
        self._store = self._connect(shards) if shards else None

    async def close(self) -> None:
        """Close the connection."""
        store, self._store, self._addresses = self._store, None, ()
        if store is not None:
            await store.close()

    async def model_folder(self, wanted: InstanceWanted) -> Path:
        """Folder of the instance's base model: its own path if the hash is right, or unpacked.

        Raises:
            DomainError: MODEL_INVALID, CHECKSUM_MISMATCH, or what the store says.
        """
        key = (wanted.model_path, wanted.model_hash)
        async with self._resolving:  # several instances of a policy hash its folder once
            if key not in self._models:
                self._models[key] = await self._resolve(wanted)
            return self._models[key]

    async def fetch(self, effect: LoadEngine) -> tuple[EngineLoad, SegmentReader | None]:
        """The command that makes an engine load, and the lease to close afterwards.

        Raises:
            DomainError: See `StoreClient.open_segment`.
        """
        load = EngineLoad(
            load_id=str(effect.load_id),
            policy=effect.order.policy,
            version=effect.order.version,
            weights_hash=effect.order.weights_hash,
        )
        if not effect.fetch:
            return load, None
        segment = await self._required().open_segment(
            effect.run_id, effect.order.key, holder=self._holder
        )
        load.path = segment.path
        load.probe_logprobs.extend(read_probe(segment.attributes))
        load.buffers.extend(
            EngineBuffer(
                name=buffer.name,
                dtype=buffer.dtype,
                shape=buffer.shape,
                offset=buffer.offset,
                size_bytes=buffer.size_bytes,
            )
            for buffer in segment.view.buffers
        )
        return load, segment

    async def _resolve(self, wanted: InstanceWanted) -> Path:
        local = ModelRef(path=wanted.model_path, content_hash=wanted.model_hash)
        store = self._required()
        try:
            return await materialise(store, local, self._cache_dir)
        except DomainError as error:
            if error.reason is not ErrorReason.MODEL_INVALID:
                raise
        run = await store.get_run(wanted.run_id)
        return await materialise(store, run.models[wanted.policies[0]], self._cache_dir)

    def _required(self) -> Store:
        if self._store is None:
            raise DomainError(ErrorReason.SHARD_NOT_FOUND, "the plan names no shard of the run")
        return self._store
