"""How much memory this process holds."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

_STATM: Final = Path("/proc/self/statm")
_PEAK_UNIT: Final = 1024
"""The kernel tells the peak in KiB."""


def resident_bytes() -> int:
    """Resident memory of the process."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def is_beyond(limit_bytes: int) -> bool:
    """Whether the process holds more than a limit; costs next to nothing while it never did."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT
    return peak_bytes > limit_bytes and resident_bytes() > limit_bytes
