"""A host without what a service needs: named before anything starts, in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.runtime import preconditions
from flexmarl.runtime.config import ConfigError
from flexmarl.runtime.main import EXIT_START_REFUSED
from flexmarl.runtime.preconditions import require_folder, require_module


def test_a_folder_is_made_with_its_mode(tmp_path: Path) -> None:
    folder = require_folder(tmp_path / "a/b", key="data_dir", mode=0o700)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert require_folder(folder, key="data_dir") == folder


def test_a_folder_that_cannot_be_is_named_with_its_key(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, why in ((file, "File exists"), (file / "below", "Not a directory")):
        with pytest.raises(ConfigError, match=rf"store\.shm_dir: {path} cannot be made: {why}"):
            require_folder(path, key="store.shm_dir")
    monkeypatch.setattr(preconditions.os, "access", lambda *_: False)  # root may always
    with pytest.raises(ConfigError, match=r"data_dir: .* cannot be written by user \d+"):
        require_folder(tmp_path, key="data_dir")


def test_a_module_of_an_extra_names_the_extra() -> None:
    require_module("json", service="meg_store")
    with pytest.raises(ConfigError, match=r"no_such is not installed .*'flexmarl\[meg-store\]'"):
        require_module("no_such", service="meg_store")


@pytest.mark.real
@pytest.mark.parametrize(
    ("service", "key"),
    [
        ("meg_store", "store.data_dir"),
        ("meg_store", "store.shm_dir"),
        ("rollout", "data_dir"),
        ("trainer", "data_dir"),
        ("orchestrator", "data_dir"),
    ],
)
def test_a_service_without_a_place_refuses_in_one_line(
    service: str, key: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file/folder"
    command = [sys.executable, "-m", f"flexmarl.{service}", "--set", "log.level=error"]
    command += ["--set", f"{key}={place}"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == EXIT_START_REFUSED
    assert done.stderr == (
        f"flexmarl {service}: {key}: {place} cannot be made: Not a directory; name another folder\n"
    )
