"""Removing what a local cluster has stored: its folder, and its training state in memory.

A cluster that stops leaves both, so that its runs can be resumed. Memory is the scarcer of the two,
and the one that nobody finds by looking into the folder.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from flexmarl.cli.cluster.folder import ClusterFolder, read_json
from flexmarl.cli.cluster.plan import STORE
from flexmarl.cli.errors import CliError
from flexmarl.runtime.children import end_leftovers


def purge_folder(folder: ClusterFolder) -> int:
    """Remove what is known to be a cluster's; returns the bytes that were freed.

    Files of anybody else stay, and so does the folder then.

    Raises:
        CliError: It is no cluster's folder, or a cluster runs there.
    """
    if not (folder.path / "lock").is_file():
        raise CliError(f"{folder.path}: no cluster was started there; nothing was removed")
    lock = folder.lock()
    try:
        end_leftovers(folder.children_file)
        freed = _free_memory(folder)
        for path in folder.entries():
            freed += _size(path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    finally:
        lock.close()
    with suppress(OSError):  # not empty: somebody else's files
        folder.path.rmdir()
    return freed


def _free_memory(folder: ClusterFolder) -> int:
    """Segments of the memory tier, wherever the store was told to keep them."""
    told = read_json(folder.service(STORE) / "memory_tier.json") or {}
    memory = Path(str(told.get("folder", "")))
    if not memory.is_absolute() or not memory.is_dir():
        return 0
    origin = Path(str(told.get("data_dir", "")))
    if origin.is_dir() and not origin.samefile(folder.service(STORE)):
        return 0  # a copy of that folder, which was never started: the memory is the other one's
    freed = 0
    for file in (*memory.glob("*.seg"), memory / "node"):
        freed += _size(file)
        file.unlink(missing_ok=True)
    with suppress(OSError):
        memory.rmdir()
    return freed


def _size(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        return sum(_size(item) for item in path.iterdir())
    try:
        return path.lstat().st_size
    except OSError:
        return 0
