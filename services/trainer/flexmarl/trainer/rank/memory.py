"""A worker's device memory for state: one block, allocated and touched once."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch

from flexmarl.core.arena import Arena, Region, aligned
from flexmarl.core.errors import DomainError, ErrorReason

_PAGE_BYTES: Final = 4096
_HUGE_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKey:
    """Names a content: one rank's part of state that equals these segments.

    Which workers share it has no part in that: a rank's part follows from how many there are.

    Attributes:
        master: Key of the weights.
        moments: Key of the moments; "" where they were left out.
        rank: Rank.
        world_size: Number of ranks.
    """

    master: str
    moments: str
    rank: int
    world_size: int


def keys_of(master: str, moments: str, *, rank: int, world_size: int) -> tuple[StateKey, StateKey]:
    """Returns the names that a rank's part may be kept under: with its moments, or without them."""
    with_moments, without = (
        StateKey(master=master, moments=each, rank=rank, world_size=world_size)
        for each in (moments, "")
    )
    return with_moments, without


@dataclass(frozen=True, slots=True)
class Room:
    """A region of the block that somebody uses."""

    region: Region
    memory: torch.Tensor


class DeviceMemory:
    """The block and its regions; may be asked by several threads.

    It grows when a policy needs more than all of it, which forgets what was kept; `generation` then
    changes, and views of the old block keep it alive.

    Args:
        size_bytes: Size at first.
        max_bytes: Largest size; 0 means no bound.
        device: Where it lies.
    """

    def __init__(self, *, size_bytes: int, max_bytes: int, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._max_bytes = max_bytes
        self._device = device
        self._arena: Arena[StateKey] = Arena(size_bytes=0)
        self._block = torch.empty(0, dtype=torch.uint8, device=device)
        self.generation = 0
        self._allocate(aligned(size_bytes))

    @property
    def used_bytes(self) -> int:
        """Bytes in use: 0 when nothing is bound."""
        return self._arena.used_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the block."""
        return self._arena.size_bytes

    @property
    def kept(self) -> tuple[StateKey, ...]:
        """Contents that can be found again."""
        with self._lock:
            return self._arena.kept

    def take(self, size_bytes: int, *, grow: bool = True) -> Room | None:
        """Uses a region; None when it does not fit beside what is in use.

        Args:
            size_bytes: Size.
            grow: Enlarge the block when nothing of it is in use.

        Raises:
            DomainError: OUT_OF_MEMORY when the bound forbids a block of this size.
        """
        with self._lock:
            region = self._arena.take(size_bytes)
            if region is None and grow and not self.used_bytes:
                self._grow(aligned(size_bytes))
                region = self._arena.take(size_bytes)
            return None if region is None else self._room(region)

    def find(self, key: StateKey) -> Room | None:
        """Uses the region that holds this content, if one does."""
        with self._lock:
            region = self._arena.find(key)
            return None if region is None else self._room(region)

    def leave(self, room: Room, key: StateKey | None) -> None:
        """Ends the use of a region; its content is kept when it has a key."""
        with self._lock:
            if key is None:
                self._arena.free(room.region)
            else:
                self._arena.keep(room.region, key)

    def _room(self, region: Region) -> Room:
        return Room(region, self._block[region.offset : region.end])

    def _grow(self, size_bytes: int) -> None:
        if self._max_bytes and size_bytes > self._max_bytes:
            raise DomainError(
                ErrorReason.OUT_OF_MEMORY,
                f"a policy needs {size_bytes} bytes of state on this slot, max_arena_bytes allows "
                f"{self._max_bytes}; raise it, or give the policy more slots",
                {"needed": str(size_bytes), "allowed": str(self._max_bytes)},
            )
        self._allocate(size_bytes)

    def _allocate(self, size_bytes: int) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device=self._device)  # the old one first
        if self._device.type == "cpu":
            self._block = _host_block(size_bytes)
        else:
            self._block = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        self._arena = Arena(size_bytes=size_bytes)
        self.generation += 1


def _host_block(size_bytes: int) -> torch.Tensor:
    """Returns memory in huge pages where the system has them, touched.

    Copies between small pages here and the small ones of a segment's file run at half the speed,
    and less. The first touch of a page costs ten times a copy into it; it is paid here.
    """
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    room = mmap.mmap(-1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel, or a system, without them
        room.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(room, dtype=torch.uint8)  # keeps the mapping
    start = -whole.data_ptr() % _HUGE_BYTES
    block = whole[start : start + size_bytes]
    block[::_PAGE_BYTES] = 0
    return block
