"""What a wheel carries: every portion with its type marker, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def names(root: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_source_file_is_in(root: Path, import_roots: list[str], names: set[str]) -> None:
    wanted = {
        path.relative_to(root / base).as_posix()
        for base in import_roots
        for path in (root / base / "flexmarl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted - names == set()
    assert "flexmarl/api/meg_store/v1/meg_store_pb2.py" in names


def test_nothing_else_is_in(names: set[str]) -> None:
    strange = {n for n in names if not n.startswith("flexmarl/") and ".dist-info/" not in n}
    assert strange == set()
    assert not [n for n in names if "test" in n.rsplit("/", 1)[-1]]
    assert "flexmarl/__init__.py" not in names


def test_the_command_and_the_licence_are_declared(names: set[str]) -> None:
    assert any(n.endswith("entry_points.txt") for n in names)
    assert any(n.endswith("licenses/LICENSE") for n in names)
