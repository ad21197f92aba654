"""One state segment: its file, its copy on disk, who reads it, and how it is stored."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.meg_store.segment_files import DISK, SegmentFile

FETCHED_FROM: Final = "fetched_from"
"""Attribute of a copy of another store's segment: the name of that shard."""

Folders: TypeAlias = Mapping[pb.SegmentTier.ValueType, Path]
"""Folder of the files of each tier."""

_AS_STORED: Final[Folders] = MappingProxyType({})
_HEAD = struct.Struct(">BqqH")


@dataclass(slots=True)
class Segment:
    """One segment as decisions see it."""

    run_id: str
    file: SegmentFile
    sealed: bool
    created_unix_ns: int
    view: pb.OpenSegmentResponse
    leases: dict[str, float] = field(default_factory=dict)
    referenced: bool = False
    """Something that training saved named it once; otherwise only its age ends it."""
    is_ours: bool = True
    """Made by this process: all its leases are known here."""
    is_mapped: bool = False
    """Until it is sealed, whoever fills it has its file locked."""
    doomed: bool = False
    """Its record is gone; the file goes with the last lease."""
    copy: SegmentFile | None = None
    """On disk, beside `file` in memory."""
    known_since: float = field(default_factory=time.monotonic)
    """When this process made, sealed or found it; monotonic seconds."""
    used_at: float = 0.0
    """When it was last sealed, opened or closed; monotonic seconds."""

    @property
    def key(self) -> str:
        """Its key."""
        return self.view.object.key

    @property
    def files(self) -> list[SegmentFile]:
        """Its files that exist."""
        files = (self.file,) if self.copy is None else (self.file, self.copy)
        return [file for file in files if file.path.exists()]

    @property
    def is_on_disk(self) -> bool:
        """Whether its content would survive the host."""
        return self.sealed and any(file.tier == DISK for file in self.files)

    @property
    def is_cached(self) -> bool:
        """Whether it is a copy of another store's segment, which can be fetched again."""
        return FETCHED_FROM in self.view.attributes

    @property
    def has_lost_memory(self) -> bool:
        """Whether its copy on disk is all that is left."""
        return not self.file.path.exists() and self.copy is not None and self.copy.path.exists()

    def move_to_copy(self) -> SegmentFile:
        """Let its copy on disk take the place of its file, which is returned."""
        assert self.copy is not None
        memory, self.file, self.copy = self.file, self.copy, None
        self.view.path, self.view.tier = str(self.file.path), self.file.tier
        self.view.disk_path = ""
        return memory

    def encode(self) -> bytes:
        """Stored form."""
        run = self.run_id.encode()
        head = _HEAD.pack(self.sealed, self.created_unix_ns, self.file.size_bytes, len(run))
        return head + run + self.view.SerializeToString()

    @classmethod
    def decode(cls, value: bytes, *, folders: Folders = _AS_STORED) -> Segment:
        """Inverse of `encode`; the segment is of a former life.

        Args:
            value: Stored form.
            folders: Where files of a tier lie by now: the data may have been moved or copied since.
        """
        sealed, created, size_bytes, run_bytes = _HEAD.unpack_from(value)
        body = _HEAD.size + run_bytes
        view = pb.OpenSegmentResponse.FromString(value[body:])
        if view.tier in folders:
            view.path = str(folders[view.tier] / Path(view.path).name)
        if view.disk_path and DISK in folders:
            view.disk_path = str(folders[DISK] / Path(view.disk_path).name)
        copy = SegmentFile(Path(view.disk_path), DISK, size_bytes) if view.disk_path else None
        segment = cls(
            run_id=value[_HEAD.size : body].decode(),
            file=SegmentFile(Path(view.path), view.tier, size_bytes),
            sealed=bool(sealed),
            created_unix_ns=created,
            view=view,
            is_ours=False,
            copy=copy,
        )
        if segment.has_lost_memory:
            segment.move_to_copy()  # the memory tier went with the host
        return segment
