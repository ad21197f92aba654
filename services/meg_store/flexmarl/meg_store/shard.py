"""One open shard: every table of the store over one database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import SHARD_KEY, Backend, Table
from flexmarl.meg_store.claims import Claims
from flexmarl.meg_store.closures import Closures
from flexmarl.meg_store.column_writes import ColumnWrites
from flexmarl.meg_store.config import StoreConfig
from flexmarl.meg_store.database import Database, DatabaseConfig
from flexmarl.meg_store.disk_room import DiskRoom
from flexmarl.meg_store.graph_queries import GraphQueries
from flexmarl.meg_store.graph_writes import GraphWrites
from flexmarl.meg_store.micro_batches import MicroBatches
from flexmarl.meg_store.objects import Objects
from flexmarl.meg_store.pins import Pins
from flexmarl.meg_store.queries import Queries
from flexmarl.meg_store.run_deletion import RunDeletion
from flexmarl.meg_store.runs import Runs
from flexmarl.meg_store.segment_fetch import SegmentFetches
from flexmarl.meg_store.segment_files import DISK, MEMORY, NodeFile, SegmentFiles
from flexmarl.meg_store.segment_tiers import SegmentTiers, StateCopies
from flexmarl.meg_store.segments import Segments
from flexmarl.meg_store.shard_loss import ShardLoss
from flexmarl.meg_store.snapshots import Snapshots
from flexmarl.meg_store.state_return import StateReturn
from flexmarl.meg_store.training import Training
from flexmarl.meg_store.vertex_listing import VertexListing
from flexmarl.runtime.logging import get_logger

_log = get_logger(__name__)


class Shard:
    """Composition of the rooms of an open store; built on the event loop that it serves.

    Args:
        backend: Open backend.
        config: Bounds and folders.
        on_fatal: Ends the process after a failed write.
        start: Runs a background task under a name.
    """

    def __init__(
        self,
        backend: Backend,
        config: StoreConfig,
        *,
        on_fatal: Callable[[BaseException], None],
        start: Callable[[str, Coroutine[Any, Any, Any]], object],
    ) -> None:
        self.config = config
        self._room = DiskRoom(config.data_dir, min_free_bytes=config.min_free_bytes)
        self.database = Database(
            backend,
            config=DatabaseConfig(
                always_sync=config.durability == "fsync",
                max_queued_bytes=config.max_queued_bytes,
                max_events=config.max_events,
                max_requests=config.max_requests,
            ),
            on_fatal=on_fatal,
            check_room=self._room.check,
        )
        self._start = start
        self._checksums: dict[str, asyncio.Event] = {}
        self.objects = Objects(self.database, shard=config.shard)
        self.runs = Runs(self.database, self.objects, shard=config.shard)
        self.claims = Claims(self.database)
        self.graph = GraphWrites(self.runs, self.objects)
        self.closures = Closures(self.runs, self.claims, shard=config.shard)
        self.micro_batches = MicroBatches(self.database, self.runs, self.claims, shard=config.shard)
        self.queries = Queries(self.database, self.runs, self.claims, shard=config.shard)
        self.listing = VertexListing(self.database, self.runs)
        self.graph_queries = GraphQueries(self.database, self.runs)
        self.columns = ColumnWrites(self.runs, self.claims, self.objects, shard=config.shard)
        self.files = SegmentFiles(
            memory_dir=config.memory_dir,
            disk_dir=config.data_dir / "segments",
            memory_bytes=config.memory_tier_bytes,
            pool_bytes=config.reuse_pool_bytes,
            check_room=self._room.check,
        )
        self.node = NodeFile(config.memory_dir)
        self.segments = Segments(
            self.database,
            self.runs,
            self.files,
            shard=config.shard,
            background=self._start_checksum,
        )
        self.tiers = SegmentTiers(
            self.database, self.segments, self.files, durably=config.durability == "fsync"
        )
        self._copies = StateCopies(self.segments, self.tiers)
        self.training = Training(
            self.database,
            self.runs,
            self.segments,
            Pins(self.database, max_ttl_s=config.lease_max_s),
            retain_versions=config.retain_versions,
            on_commit=self._committed,
        )
        self.returns = StateReturn(self.runs, self.segments, self.training)
        self.loss = ShardLoss(self.database, self.runs)
        self.fetches = SegmentFetches(self.database, self.segments, self.tiers)
        self.deletion = RunDeletion(
            self.database,
            self.runs,
            self.objects,
            shard=config.shard,
            segments=self.segments,
            forget=(self.training.forget, self.claims.forget, self.graph.forget),
            start=start,
        )
        self.snapshots = Snapshots(
            self.database,
            self.segments,
            folder=config.data_dir / "snapshots",
            shard=config.shard,
            check_room=self._room.check,
        )

    async def recover(self) -> None:
        """Finish what a former process life left: dead uploads, checksums.

        Raises:
            DomainError: INVALID_ARGUMENT when the data are another shard's.
        """
        await self._claim_name()
        await self.objects.sweep_uploads()
        for key in self.segments.without_checksum():
            self._start_checksum(key)
        self._start("store sweeper", self._sweep())
        self._start("copies of states to disk", self._copies.run())

    async def close(self) -> None:
        """Write what is queued, release the database and the pages that nothing names."""
        await self.database.close()
        self.node.remove()
        self.files.close()

    async def _claim_name(self) -> None:
        """References name this shard: its data serve under no other name."""
        name = self.config.shard
        draft = self.database.begin(essential=True)
        stored = draft.get(Table.META, SHARD_KEY)
        if stored is None:
            draft.put(Table.META, SHARD_KEY, name.encode())
            await self.database.commit(draft)
        elif stored.decode() != name:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"store.shard: {self.config.data_dir} holds the data of shard {stored.decode()!r}, "
                f"not of {name!r}",
            )

    async def wait_checksum(self, key: str) -> None:
        """Wait for a checksum that is being computed; freed by its task, bounded by the caller."""
        done = self._checksums.get(key)
        if done is not None:
            await done.wait()

    def numbers(self) -> dict[str, float]:
        """Sizes, for GetStats and metrics."""
        return {
            "runs": len(self.runs),
            "queued_bytes": self.database.queued_bytes,
            "write_groups": self.database.writer.num_groups,
            "syncs": self.database.writer.num_syncs,
            "late_results": self.graph.num_late,
            "segments": len(self.segments),
            "leases": self.segments.num_leases,
            "memory_tier_bytes": self.files.used_bytes[MEMORY],
            "disk_tier_bytes": self.files.used_bytes[DISK],
            "pool_bytes": self.files.pool_bytes,
            "segments_spilled": self.tiers.num_spilled,
            "disk_free_bytes": self._room.free_bytes,
        }

    def _committed(self, run_id: str, version: int, segment_keys: frozenset[str]) -> None:
        every = self.config.state_to_disk_every
        if every and version % every == 0:
            self._copies.want(run_id, version, segment_keys)

    def _start_checksum(self, key: str) -> None:
        self._checksums[key] = asyncio.Event()
        self._start(f"checksum of {key}", self._checksum(key))

    async def _checksum(self, key: str) -> None:
        try:
            await self.segments.compute_checksum(key)
        finally:
            self._checksums.pop(key).set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.config.sweep_every_s)
            ttl_s, now = self.config.orphan_ttl_s, time.monotonic()
            try:
                objects = await self.objects.sweep_orphans(ttl_s=ttl_s, now=now)
                segments = await self.segments.sweep(
                    orphan_ttl_s=ttl_s, lease_max_s=self.config.lease_max_s, now=now
                )
            except DomainError as error:  # a damaged block: other rooms' sweeps go on
                _log.warning("sweep_put_off", reason=error.reason.value)
                continue
            if objects:
                await self.database.compact([(Table.BLOBS, None, None)])
            if objects or segments:
                _log.info("swept", objects=objects, segments=segments)
