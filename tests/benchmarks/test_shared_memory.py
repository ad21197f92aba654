"""Folders in shared memory end with their block, and those of killed benchmarks with the next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.shared_memory import shared_folder

_KILLED = """
import os, signal, sys
from pathlib import Path
from benchmarks.shared_memory import shared_folder
with shared_folder(Path(sys.argv[1])) as folder:
    (folder / "file").write_bytes(bytes(100))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_ends_with_its_block_however_that_ends(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), shared_folder(tmp_path) as folder:
        (folder / "file").touch()
        with shared_folder(tmp_path) as other:
            assert folder.is_dir(), "its process lives"
            assert other != folder
        raise ValueError("x")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_benchmark_left_is_removed_by_the_next(tmp_path: Path) -> None:
    foreign = tmp_path / "flexmarl-bench-unnamed"
    foreign.mkdir()
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert done.returncode < 0
    assert len(list(tmp_path.iterdir())) == 2
    with shared_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == [foreign]
