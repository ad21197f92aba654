"""CreateSnapshot: a copy of the shard, made while it serves; restore.py makes a store of it again.

A snapshot is a folder: `db`, a checkpoint of all tables, objects included; `segments`, copies of
the sealed segments; `snapshot.json`, written last, which lists both. Without it it is not whole.
Those of several shards fit together when their tables were copied under one hold (write_hold.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import check_name
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Database
from flexmarl.meg_store.objects import ObjectRecord
from flexmarl.meg_store.paging import patient
from flexmarl.meg_store.segments import Segments
from flexmarl.runtime.aio import in_thread
from flexmarl.runtime.server import write_json_atomically

LIST_NAME: Final = "snapshot.json"
FORMAT: Final = 1
_HOLDER: Final = "snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotList:
    """What `snapshot.json` says.

    Attributes:
        format: Of this file.
        shard: Name of the shard.
        request_id: Call that made it.
        created_unix_ns: When.
        objects: Size in bytes of each object, by key; their content is in `db`.
        segments: File name below `segments` of each sealed segment, by key.
        segment_bytes: Size of those files.
        hold_id: Hold that it was made under, with those of other shards; empty: alone.
    """

    format: int
    shard: str
    request_id: str
    created_unix_ns: int
    objects: dict[str, int]
    segments: dict[str, str]
    segment_bytes: int
    hold_id: str = ""

    @classmethod
    def read(cls, folder: Path) -> SnapshotList:
        """Read the list of a whole snapshot.

        Raises:
            DomainError: NOT_FOUND where there is none, INVALID_ARGUMENT for another format.
        """
        path = folder / LIST_NAME
        if not path.is_file():
            raise DomainError(
                ErrorReason.NOT_FOUND, f"{folder}: is not a whole snapshot, it has no {LIST_NAME}"
            )
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise _not_a_list(path, f"format {values['format']} is unknown")
            return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise _not_a_list(path, str(error)) from None


def _not_a_list(path: Path, why: str) -> DomainError:
    return DomainError(
        ErrorReason.INVALID_ARGUMENT, f"{path}: is not the list of a snapshot: {why}"
    )


class Snapshots:
    """Makes snapshots of this shard, one at a time.

    Args:
        database: Its tables are copied.
        segments: Its segments are copied, too.
        folder: Where snapshots lie.
        shard: Name of this shard.
        check_room: Raises DISK_FULL where the disk has no room for this many bytes.
    """

    def __init__(
        self,
        database: Database,
        segments: Segments,
        *,
        folder: Path,
        shard: str,
        check_room: Callable[[int], None],
    ) -> None:
        self._database = database
        self._segments = segments
        self._folder = folder
        self._shard = shard
        self._check_room = check_room
        self._making = asyncio.Lock()

    async def create(self, request: pb.CreateSnapshotRequest) -> pb.CreateSnapshotResponse:
        """Make a snapshot; the same call again is answered.

        Raises:
            DomainError: ALREADY_EXISTS for a name that is taken, DISK_FULL,
                STATE_TRANSITION_REFUSED for a hold that has ended.
            ValueError: The name is not one.
        """
        target = self._folder / check_name(request.name, what="snapshot")
        async with self._making:  # bounded by the deadline of the call
            if (target / LIST_NAME).exists():
                known = SnapshotList.read(target)
                if known.request_id != request.request_id or not request.request_id:
                    raise DomainError(
                        ErrorReason.ALREADY_EXISTS, f"snapshot {request.name!r} exists already"
                    )
                return _answer(target, known)
            return _answer(target, await self._make(target, request))

    async def _make(self, target: Path, request: pb.CreateSnapshotRequest) -> SnapshotList:
        building = target.with_name(f".{target.name}.building")
        leases = self._hold({})
        try:
            await in_thread(_start_folder, building)
            await in_thread(self._database.backend.checkpoint, building / "db")
            if request.hold_id and not self._database.hold.end(request.hold_id):
                raise DomainError(
                    ErrorReason.STATE_TRANSITION_REFUSED,
                    f"snapshot {target.name!r}: mutations went on before the tables of store shard "
                    f"{self._shard!r} were copied, so it would not fit those of other shards; "
                    "make it again",
                )
            # What was sealed while the tables were copied may be named in them.
            leases = self._hold(leases)
            self._check_room(sum(lease.object.size_bytes for lease in leases.values()))
            copied = await in_thread(_copy_segments, leases, building / "segments")
            made = SnapshotList(
                format=FORMAT,
                shard=self._shard,
                request_id=request.request_id,
                created_unix_ns=time.time_ns(),
                objects=await self._objects(),
                segments={key: path.name for key, path in sorted(copied.items())},
                segment_bytes=sum(path.stat().st_size for path in copied.values()),
                hold_id=request.hold_id,
            )
            write_json_atomically(building / LIST_NAME, asdict(made))
            building.rename(target)
        except OSError as error:
            raise DomainError(
                ErrorReason.DISK_FULL, f"snapshot {target.name!r}: {os.strerror(error.errno or 0)}"
            ) from error
        finally:
            for response in leases.values():
                self._segments.close(response.lease_id)
            await asyncio.to_thread(shutil.rmtree, building, ignore_errors=True)
        return made

    def _hold(self, held: dict[str, pb.OpenSegmentResponse]) -> dict[str, pb.OpenSegmentResponse]:
        """Lease every sealed segment that is not held yet, so that its file stays."""
        now = time.monotonic()
        for segment in self._segments.sealed():
            if segment.key in held or not segment.file.path.exists():
                continue
            request = pb.OpenSegmentRequest(run_id=segment.run_id, key=segment.key, holder=_HOLDER)
            try:
                held = {**held, segment.key: self._segments.open(request, now=now)}
            except DomainError:
                continue  # its seal is not written yet, so no copied table has it
        return held

    async def _objects(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        async for _, value in patient(self._database.scan(Table.META, keys.prefix("object"))):
            record = ObjectRecord.decode(value)
            sizes[record.ref.key] = record.ref.size_bytes
        return sizes


def _start_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # what a killed one left
    (folder / "segments").mkdir(parents=True, mode=0o700)


def _copy_segments(leases: dict[str, pb.OpenSegmentResponse], folder: Path) -> dict[str, Path]:
    copied: dict[str, Path] = {}
    for key, response in leases.items():
        source = Path(response.path)
        copied[key] = Path(shutil.copyfile(source, folder / source.name))
    return copied


def _answer(folder: Path, listed: SnapshotList) -> pb.CreateSnapshotResponse:
    return pb.CreateSnapshotResponse(
        path=str(folder),
        num_objects=len(listed.objects),
        num_segments=len(listed.segments),
        segment_bytes=listed.segment_bytes,
        shard=listed.shard,
    )
