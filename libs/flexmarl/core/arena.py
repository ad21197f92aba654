"""Who has which part of a device's one block of memory.

A region is *used* by what is bound, or *kept*: its content is known by a key and whoever needs room
may take it, the one kept longest first. So a suspended policy occupies nothing, and one that comes
back before its room was needed finds its state where it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

ALIGNMENT: Final = 64
"""Regions start at multiples of a cache line."""

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of the block."""

    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + self.size_bytes


class Arena(Generic[KeyT]):
    """The regions of one block.

    Args:
        size_bytes: Size of the block.
    """

    def __init__(self, *, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._used: list[Region] = []
        self._kept: OrderedDict[KeyT, Region] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """Bytes of regions in use."""
        return sum(region.size_bytes for region in self._used)

    @property
    def kept(self) -> tuple[KeyT, ...]:
        """Content that can be found again, the one kept longest first."""
        return tuple(self._kept)

    def take(self, size_bytes: int) -> Region | None:
        """Uses a region; None when it does not fit beside what is used, and nothing is given up."""
        size = aligned(size_bytes)
        if self._gap(size, self._used) is None:
            return None
        while (region := self._gap(size, [*self._used, *self._kept.values()])) is None:
            self._kept.popitem(last=False)
        self._used.append(region)
        return region

    def find(self, key: KeyT) -> Region | None:
        """Uses the region that holds this content, if one does."""
        region = self._kept.pop(key, None)
        if region is not None:
            self._used.append(region)
        return region

    def keep(self, region: Region, key: KeyT) -> None:
        """Ends the use of a region and remembers its content."""
        self._used.remove(region)
        self._kept.pop(key, None)
        self._kept[key] = region

    def free(self, region: Region) -> None:
        """Ends the use of a region whose content nobody needs."""
        self._used.remove(region)

    def _gap(self, size: int, occupied: Iterable[Region]) -> Region | None:
        """The first gap between these that is large enough."""
        start = 0
        for region in sorted(occupied, key=lambda r: r.offset):
            if region.offset - start >= size:
                break
            start = region.end
        return Region(start, size) if start + size <= self.size_bytes else None


def aligned(size_bytes: int) -> int:
    """Returns the next multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
