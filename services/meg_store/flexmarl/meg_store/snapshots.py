"""CreateSnapshot: a copy of the shard, made while it serves; `restore` makes a store of it again.

A snapshot is a folder: `db`, a checkpoint of all tables, objects included; `segments`, copies of
the sealed segments; `snapshot.json`, written last, which lists both. Without it it is not whole.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from flexmarl.api.meg_store.v1alpha1 import meg_store_pb2 as pb
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import check_name
from flexmarl.meg_store.backend import Backend, Batch, Table
from flexmarl.meg_store.database import Database
from flexmarl.meg_store.objects import ObjectRecord
from flexmarl.meg_store.segment_record import Segment
from flexmarl.meg_store.segments import Segments
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
    """

    format: int
    shard: str
    request_id: str
    created_unix_ns: int
    objects: dict[str, int]
    segments: dict[str, str]
    segment_bytes: int

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
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("format") != FORMAT:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT, f"{path}: format {values.get('format')} is unknown"
            )
        return cls(**values)


class Snapshots:
    """Makes snapshots of this shard."""

    def __init__(self, database: Database, segments: Segments, *, folder: Path, shard: str) -> None:
        self._database = database
        self._segments = segments
        self._folder = folder
        self._shard = shard

    async def create(self, request: pb.CreateSnapshotRequest) -> pb.CreateSnapshotResponse:
        """Make a snapshot; the same call again is answered.

        Raises:
            DomainError: ALREADY_EXISTS for a name that is taken, DISK_FULL.
            ValueError: The name is not one.
        """
        target = self._folder / check_name(request.name, what="snapshot")
        if (target / LIST_NAME).exists():
            known = SnapshotList.read(target)
            if known.request_id != request.request_id or not request.request_id:
                raise DomainError(
                    ErrorReason.ALREADY_EXISTS, f"snapshot {request.name!r} exists already"
                )
            return _answer(target, known)
        made = await self._make(target, request.request_id)
        return _answer(target, made)

    async def _make(self, target: Path, request_id: str) -> SnapshotList:
        building = target.with_name(f".{target.name}.building")
        leases = self._hold({})
        try:
            await asyncio.to_thread(_start_folder, building)
            await asyncio.to_thread(self._database.backend.checkpoint, building / "db")
            # What was sealed while the tables were copied may be named in them.
            leases = self._hold(leases)
            copied = await asyncio.to_thread(_copy_segments, leases, building / "segments")
            made = SnapshotList(
                format=FORMAT,
                shard=self._shard,
                request_id=request_id,
                created_unix_ns=time.time_ns(),
                objects=self._objects(),
                segments={key: path.name for key, path in sorted(copied.items())},
                segment_bytes=sum(path.stat().st_size for path in copied.values()),
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
            if segment.key not in held and segment.file.path.exists():
                request = pb.OpenSegmentRequest(
                    run_id=segment.run_id, key=segment.key, holder=_HOLDER
                )
                held = {**held, segment.key: self._segments.open(request, now=now)}
        return held

    def _objects(self) -> dict[str, int]:
        records = (
            ObjectRecord.decode(value)
            for _, value in self._database.scan(Table.META, keys.prefix("object"))
        )
        return {record.ref.key: record.ref.size_bytes for record in records}


def restore(snapshot: Path, data_dir: Path) -> SnapshotList:
    """Make the data folder of a store from a snapshot; it appears whole or not at all.

    Segments come to the disk tier. Segments that were still being written are forgotten.

    Raises:
        DomainError: NOT_FOUND, INVALID_ARGUMENT for the snapshot, ALREADY_EXISTS for a data folder
            that holds a store.
    """
    from flexmarl.meg_store.rocks_backend import RocksBackend

    listed = SnapshotList.read(snapshot)
    if (data_dir / "db").exists():
        raise DomainError(
            ErrorReason.ALREADY_EXISTS,
            f"{data_dir}: holds a store already; name another folder, or move that one away",
        )
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    building = data_dir.with_name(f".{data_dir.name}.restoring")
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(mode=0o700)
        shutil.copytree(snapshot / "db", building / "db")
        shutil.copytree(snapshot / "segments", building / "segments")
        backend = RocksBackend(building / "db")
        try:
            _place_segments(backend, listed, data_dir / "segments")
        finally:
            backend.close()
        if data_dir.exists():
            for path in building.iterdir():
                path.rename(data_dir / path.name)
        else:
            building.rename(data_dir)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return listed


def _start_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # what a killed one left
    (folder / "segments").mkdir(parents=True, mode=0o700)


def _copy_segments(leases: dict[str, pb.OpenSegmentResponse], folder: Path) -> dict[str, Path]:
    copied: dict[str, Path] = {}
    for key, response in leases.items():
        source = Path(response.path)
        copied[key] = Path(shutil.copyfile(source, folder / source.name))
    return copied


def _place_segments(backend: Backend, listed: SnapshotList, folder: Path) -> None:
    """Let the records of segments name the files of the new disk tier."""
    batch = Batch()
    prefix = keys.prefix("segment")
    for key, value in backend.scan(Table.META, prefix, keys.after(prefix)):
        segment = Segment.decode(value)
        name = listed.segments.get(segment.key)
        if name is None:
            batch.put(Table.META, key, None)
            continue
        segment.view.path = str(folder / name)
        segment.view.tier = pb.SEGMENT_TIER_DISK
        batch.put(Table.META, key, segment.encode())
    backend.write([batch])
    backend.flush()


def _answer(folder: Path, listed: SnapshotList) -> pb.CreateSnapshotResponse:
    return pb.CreateSnapshotResponse(
        path=str(folder),
        num_objects=len(listed.objects),
        num_segments=len(listed.segments),
        segment_bytes=listed.segment_bytes,
    )
