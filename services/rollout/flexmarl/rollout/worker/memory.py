"""How much memory this process holds."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

_STATM: Final = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Resident memory of the process."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()
