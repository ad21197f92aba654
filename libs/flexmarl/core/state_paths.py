"""By which path saved state comes to slots that do not keep it, where others of the node do.

    SEGMENTS  read from the memory tier; always possible
    DEVICE    sent by the slots that keep it, one to one, over the process groups' transport

Which one is faster depends on the machine: a CPU's sockets move less than its memory, a GPU's links
more. So the rates decide: what was measured here, and before that what a device of this kind is
expected to do. A path that was never taken is judged by the expectation alone; a config key forces
one. A wrong guess costs time, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

GIB: Final = 1 << 30

MIN_BYTES: Final = 16 << 20
"""Less says how long calls take, not how fast bytes move."""

_WEIGHT_OF_NEWEST: Final = 0.3


class StatePath(StrEnum):
    """See the module's text."""

    SEGMENTS = "segments"
    DEVICE = "device"


EXPECTED: Final[Mapping[str, Mapping[StatePath, float]]] = MappingProxyType(
    {
        "cpu": MappingProxyType({StatePath.SEGMENTS: 1.0 * GIB, StatePath.DEVICE: 0.3 * GIB}),
        "cuda": MappingProxyType({StatePath.SEGMENTS: 8.0 * GIB, StatePath.DEVICE: 40.0 * GIB}),
    }
)
"""Bytes per second by kind of device. CPU: this project's benchmark, between processes of one
machine. CUDA: a copy from pageable memory over a bus, and a modest link between devices."""


@dataclass(frozen=True, slots=True)
class PathChoice:
    """A path, and why."""

    path: StatePath
    reason: str


@dataclass(slots=True, kw_only=True)
class StatePaths:
    """What is known of one trainer's paths.

    Attributes:
        device: Kind of its devices, a key of `EXPECTED`.
        forced: Path that the config asks for; None lets the rates decide.
    """

    device: str
    forced: StatePath | None = None
    _measured: dict[StatePath, float] = field(default_factory=dict)

    def choose(self) -> PathChoice:
        """Returns the path of the next binding whose state others keep."""
        if self.forced is not None:
            return PathChoice(self.forced, "the config says so")
        rates = {path: self._rate(path) for path in StatePath}
        best = max(rates, key=lambda path: rates[path])
        listed = ", ".join(f"{path} {rate / GIB:.2f} GiB/s" for path, rate in rates.items())
        return PathChoice(best, listed)

    def loaded(self, num_bytes: Mapping[str, int], *, seconds: float) -> None:
        """A binding's state came, by these paths: bytes on all slots together.

        What did not come from other slots was read beside it; the whole says what choosing them
        was worth.
        """
        moved = sum(num_bytes.get(path, 0) for path in StatePath)
        if moved < MIN_BYTES or seconds <= 0:
            return
        path = StatePath.DEVICE if num_bytes.get(StatePath.DEVICE) else StatePath.SEGMENTS
        newest, old = moved / seconds, self._measured.get(path)
        self._measured[path] = newest if old is None else old + _WEIGHT_OF_NEWEST * (newest - old)

    def _rate(self, path: StatePath) -> float:
        return self._measured.get(path, EXPECTED[self.device][path])
