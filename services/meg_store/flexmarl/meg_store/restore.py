"""Data folders made of snapshots: of one store, or of several that were copied at one moment.

Everything that can be refused is, before a byte is copied; then all folders are built beside their
places, and only when all are whole does each take its name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import Backend, Batch, Table
from flexmarl.meg_store.rocks_backend import RocksBackend
from flexmarl.meg_store.segment_record import Segment
from flexmarl.meg_store.snapshots import SnapshotList

_NAMED: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)=(.+)")


@dataclass(frozen=True, slots=True)
class Restored:
    """One folder that was made.

    Attributes:
        listed: What the snapshot says of itself.
        folder: Data folder of the store.
    """

    listed: SnapshotList
    folder: Path


def restore(snapshots: Sequence[Path], folders: Sequence[str]) -> list[Restored]:
    """Make the data folders of stores from snapshots; they appear whole or not at all.

    Segments come to the disk tier. Segments that were still being written are forgotten.

    Args:
        snapshots: Folders of snapshots, each of another shard.
        folders: `SHARD=FOLDER` for each of them; for one, its folder alone will do.

    Raises:
        DomainError: NOT_FOUND, INVALID_ARGUMENT for a snapshot, for several that were not made
            together, or for folders that do not fit them; ALREADY_EXISTS for a data folder that
            holds a store.
    """
    listed = _read(snapshots)
    targets = _targets(listed, folders)
    for name, folder in targets.items():
        if (folder / "db").exists():
            raise DomainError(
                ErrorReason.ALREADY_EXISTS,
                f"{folder}: holds a store already; name another folder for store shard {name!r}, "
                "or move that one away",
                {"shard": name},
            )
    building = {name: f.with_name(f".{f.name}.restoring") for name, f in targets.items()}
    try:
        for name, (snapshot, of_shard) in listed.items():
            _build(snapshot, of_shard, building[name], folder=targets[name])
        for name, folder in targets.items():
            _take_place(building[name], folder)
    finally:
        for path in building.values():
            shutil.rmtree(path, ignore_errors=True)
    return [Restored(of_shard, targets[name]) for name, (_, of_shard) in listed.items()]


def _read(snapshots: Sequence[Path]) -> dict[str, tuple[Path, SnapshotList]]:
    """Snapshots by shard."""
    listed: dict[str, tuple[Path, SnapshotList]] = {}
    for snapshot in snapshots:
        read = SnapshotList.read(snapshot)
        if read.shard in listed:
            raise _invalid(
                f"{listed[read.shard][0]} and {snapshot} are both of store shard {read.shard!r}"
            )
        listed[read.shard] = (snapshot, read)
    if len(listed) > 1 and len({read.hold_id or name for name, (_, read) in listed.items()}) > 1:
        raise _invalid(
            "these snapshots were not made together, so what they say of a run may not agree: "
            "`flexmarl store snapshot --run RUN` copies all of a run's stores at one moment"
        )
    return listed


def _targets(shards: Iterable[str], folders: Sequence[str]) -> dict[str, Path]:
    """Folder of each shard."""
    names = list(shards)
    named = [_NAMED.fullmatch(folder) for folder in folders]
    if len(names) == len(folders) == 1 and named[0] is None:
        return {names[0]: Path(folders[0]).resolve()}
    given: dict[str, Path] = {}
    for folder, match in zip(folders, named, strict=True):
        if match is None:
            raise _invalid(f"{folder}: say which store shard it is for: SHARD={folder}")
        if match[1] not in names:
            raise _invalid(
                f"{folder}: no snapshot is of store shard {match[1]!r}, "
                f"those given are of {', '.join(map(repr, names))}"
            )
        given[match[1]] = Path(match[2]).resolve()
    missing = [name for name in names if name not in given]
    if missing:
        raise _invalid(f"store shard {missing[0]!r}: give its folder, {missing[0]}=FOLDER")
    _check_apart(given)
    return {name: given[name] for name in names}


def _check_apart(folders: Mapping[str, Path]) -> None:
    taken: dict[Path, str] = {}
    for name, folder in folders.items():
        first = taken.setdefault(folder, name)
        if first != name:
            raise _invalid(f"{folder}: given for store shards {first!r} and {name!r}")


def _build(snapshot: Path, listed: SnapshotList, building: Path, *, folder: Path) -> None:
    building.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(mode=0o700)
    shutil.copytree(snapshot / "db", building / "db")
    shutil.copytree(snapshot / "segments", building / "segments")
    backend = RocksBackend(building / "db")
    try:
        _place_segments(backend, listed, folder / "segments")
    finally:
        backend.close()


def _take_place(building: Path, folder: Path) -> None:
    if not folder.exists():
        building.rename(folder)
        return
    for path in building.iterdir():
        path.rename(folder / path.name)


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
        segment.view.disk_path = ""
        batch.put(Table.META, key, segment.encode())
    backend.write([batch])
    backend.flush()


def _invalid(message: str) -> DomainError:
    return DomainError(ErrorReason.INVALID_ARGUMENT, message)
