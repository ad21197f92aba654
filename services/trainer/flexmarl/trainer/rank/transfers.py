"""Bytes between a device and files of the host.

The host's own memory is read and written directly. A device goes through two pinned buffers: while
one is on its way to or from the device, the other is on its way from or to the file. Nobody reads a
buffer before the copy into it was waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import torch

from flexmarl.trainer.rank.segments import SegmentFile

STAGING_BYTES: Final = 64 << 20
"""Size of each of the two pinned buffers: large enough that a copy's start is paid once in a few
milliseconds of transfer."""


class Transfers(Protocol):
    """Moves flat byte tensors of a device to and from segment files."""

    def load(self, file: SegmentFile, offset: int, target: torch.Tensor) -> None:
        """Fills `target` (uint8, on the device) from the file; usable when this returns."""

    def store(self, file: SegmentFile, offset: int, source: torch.Tensor) -> None:
        """Writes `source` (uint8, on the device); in the file when this returns."""


class HostTransfers:
    """For state in the host's memory."""

    def load(self, file: SegmentFile, offset: int, target: torch.Tensor) -> None:
        """See `Transfers`."""
        file.read(offset, target)

    def store(self, file: SegmentFile, offset: int, source: torch.Tensor) -> None:
        """See `Transfers`."""
        file.write(offset, source)


class Stream(Protocol):
    """Copies in the background, each told apart by the staging buffer that it uses."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, slot: int) -> None:
        """Begins a copy, after everything that the device was given before."""

    def wait(self, slot: int) -> None:
        """Waits until the copy that was begun last with this buffer is done."""


class StagedTransfers:
    """For state on a device.

    Args:
        stream: Copies between device and staging buffers.
        staging: Two flat byte tensors of one size on the host, pinned for a real device.
    """

    def __init__(self, stream: Stream, staging: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._stream = stream
        self._staging = staging

    def load(self, file: SegmentFile, offset: int, target: torch.Tensor) -> None:
        """See `Transfers`."""
        slot = 0
        for slot, start, part in self._parts(target):
            buffer = self._staging[slot][: part.numel()]
            self._stream.wait(slot)  # its last content must have left
            file.read(offset + start, buffer)
            self._stream.copy(part, buffer, slot=slot)
        self._stream.wait(1 - slot)
        self._stream.wait(slot)

    def store(self, file: SegmentFile, offset: int, source: torch.Tensor) -> None:
        """See `Transfers`."""
        before: tuple[int, int, int] | None = None
        for slot, start, part in self._parts(source):
            self._stream.copy(self._staging[slot][: part.numel()], part, slot=slot)
            if before is not None:
                self._write(file, offset, *before)
            before = (slot, start, part.numel())
        if before is not None:
            self._write(file, offset, *before)

    def _write(self, file: SegmentFile, offset: int, slot: int, start: int, count: int) -> None:
        self._stream.wait(slot)
        file.write(offset + start, self._staging[slot][:count])

    def _parts(self, whole: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        size = self._staging[0].numel()
        for number, start in enumerate(range(0, whole.numel(), size)):
            yield number % 2, start, whole[start : start + size]


class CudaStream:
    """A side stream of a CUDA device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = (_event(), _event())

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, slot: int) -> None:
        """See `Stream`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._done[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        """See `Stream`."""
        self._done[slot].synchronize()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def transfers_of(device: torch.device) -> Transfers:
    """Returns the transfers of a device."""
    if device.type == "cpu":
        return HostTransfers()
    staging = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    return StagedTransfers(CudaStream(device), (staging[0], staging[1]))
