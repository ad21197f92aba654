"""Files of payloads: what large writes bring goes past RocksDB, which keeps where it lies.

    db/payloads/00000007     payloads, one after the other; appended to, never changed
    table PAYLOADS           the payload itself, or its place: file, offset, size, checksum

Payloads are synced before their places are written, so a place never names what is not there. What
a crash leaves behind its last synced payload is named by nothing: a start begins a new file.
"""

from __future__ import annotations

import os
import shutil
import struct
import threading
from collections.abc import Collection, Sequence
from itertools import accumulate, repeat
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Final
from zlib import crc32

FILE_BYTES: Final = 256 << 20
"""A file that has this many bytes is not appended to any more."""

_PLACE: Final = struct.Struct(">BIIII")
_MARK: Final = b"\0"
"""First byte of a place; no message starts with it."""

_MAX_MAPPED: Final = 128
_MAX_PARTS: Final = 1024  # of one call of the system


class PayloadFiles:
    """The payload files of one database. One thread appends; any thread reads.

    Args:
        folder: Theirs; made by the first payload.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = max(map(int, self._names()), default=0)
        self._file = -1
        self._size_bytes = 0
        self._maps: dict[int, mmap] = {}
        self._mapping = threading.Lock()

    def append(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Write and sync; returns their places.

        Raises:
            OSError: The disk is full, or failed.
        """
        if self._file < 0 or self._size_bytes >= FILE_BYTES:
            self._begin()
        sizes = list(map(len, payloads))
        offsets = list(accumulate(sizes, initial=self._size_bytes))
        for start in range(0, len(payloads), _MAX_PARTS):
            self._write(payloads[start : start + _MAX_PARTS])
        os.fdatasync(self._file)
        self._size_bytes = offsets.pop()
        return list(
            map(_PLACE.pack, repeat(0), repeat(self._number), offsets, sizes, map(crc32, payloads))
        )

    def read(self, places: Sequence[bytes]) -> list[bytes]:
        """The payloads at places.

        Raises:
            OSError: A file is gone.
            ValueError: What lies there is not what was written.
        """
        payloads: list[bytes] = []
        maps = self._maps
        for _, number, offset, size, checksum in _PLACE.iter_unpack(b"".join(places)):
            mapped = maps.get(number)
            end = offset + size
            if mapped is None or end > len(mapped):
                mapped = self._map(number)
            payload = mapped[offset:end]
            if crc32(payload) != checksum:
                raise ValueError(f"payload file {number}: the {size} bytes at {offset} are damaged")
            payloads.append(payload)
        return payloads

    def copy_to(self, folder: Path) -> None:
        """Link all files into a new folder, or copy them where it is on another disk."""
        names = self._names()
        if not names:
            return
        folder.mkdir()
        for name in names:
            try:
                os.link(self._folder / name, folder / name)
            except OSError:
                shutil.copyfile(self._folder / name, folder / name)

    def closed(self) -> list[int]:
        """Numbers of the files that nothing is appended to any more."""
        first_open = self._number if self._file >= 0 else self._number + 1
        return [number for name in self._names() if (number := int(name)) < first_open]

    def remove(self, numbers: Collection[int]) -> None:
        """Remove files that no place names."""
        for number in numbers:
            self._maps.pop(number, None)
            (self._folder / _name(number)).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the files."""
        self._maps.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / _name(self._number + 1)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._number += 1
        self._size_bytes = 0
        for folder in (self._folder, self._folder.parent):
            _sync(folder)  # its name must survive power loss, too

    def _write(self, parts: Sequence[bytes]) -> None:
        left = sum(map(len, parts)) - os.writev(self._file, parts)
        if left:  # interrupted, or the disk is nearly full
            rest = memoryview(b"".join(parts))[-left:]
            while rest:
                rest = rest[os.write(self._file, rest) :]

    def _map(self, number: int) -> mmap:
        """Map a file as long as it is now. What is mapped no more ends with its last reader."""
        with (self._folder / _name(number)).open("rb") as file:
            mapped = mmap(file.fileno(), 0, access=ACCESS_READ)
        with self._mapping:  # of two readers each would drop what the other drops
            self._maps.pop(number, None)
            while len(self._maps) >= _MAX_MAPPED:
                self._maps.pop(next(iter(self._maps)))
            self._maps[number] = mapped
        return mapped

    def _names(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        return [path.name for path in self._folder.iterdir() if path.name.isdecimal()]


def is_place(value: bytes) -> bool:
    """Whether a value of the table is the place of a payload."""
    return value[:1] == _MARK


def file_of(place: bytes) -> int:
    """Number of the file that a place names."""
    number: int = _PLACE.unpack(place)[1]
    return number


def _name(number: int) -> str:
    return f"{number:08d}"


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
