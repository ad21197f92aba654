"""Folders in shared memory for the length of a measurement; they would take memory for good.

A benchmark that is killed leaves its folder behind, so the next one removes what belongs to no
process any more.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path("/dev/shm")

_PREFIX: Final = "flexmarl-bench-"


@contextmanager
def shared_folder(root: Path = ROOT) -> Iterator[Path]:
    """A folder of this process, gone after the block."""
    for left in root.glob(f"{_PREFIX}*-*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not _lives(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
