"""The contracts: generated code is what the protos say, comments are there, names follow rules."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RELEASED = Path("protos/released.binpb")
SERVICES = ["meg_store", "orchestrator", "rollout", "trainer"]


def test_generated_code_is_up_to_date(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/generate_protos.py", "--check"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def buf(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name("buf")
    return subprocess.run(
        [tool, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def test_buf_accepts_names_and_comments(root: Path) -> None:
    done = buf("lint", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr


def test_contracts_keep_what_was_released(root: Path) -> None:
    done = buf("breaking", "--against", RELEASED, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  string run_id = 1;", "  uint64 run_id = 1;", 'type from "string" to "uint64"'),
        ("  uint64 batch = 2;", "", 'field "2" with name "batch"'),
        ("  string policy = 3;", "  string team = 3;", 'from "policy" to "team"'),
        ("  rpc MarkRows(MarkRowsRequest) returns (MarkRowsResponse);", "", '"MarkRows"'),
    ],
    ids=["type", "field", "name", "method"],
)
def test_a_broken_contract_is_named(
    root: Path, tmp_path: Path, old: str, new: str, said: str
) -> None:
    shutil.copytree(root / "protos/flexmarl", tmp_path / "protos/flexmarl")
    shutil.copy(root / RELEASED, tmp_path / RELEASED)
    shutil.copy(root / "buf.yaml", tmp_path)
    contract = tmp_path / "protos/flexmarl/api/meg_store/v1/meg_store.proto"
    text = contract.read_text(encoding="utf-8")
    start = text.index("message ListMicroBatchesRequest {") if "rpc" not in old else 0
    before, after = text[:start], text[start:]
    assert old in after
    contract.write_text(before + after.replace(old, new, 1), encoding="utf-8")
    done = buf("breaking", "--against", RELEASED, cwd=tmp_path)
    assert done.returncode != 0
    assert said in done.stdout, done.stdout + done.stderr


def test_every_comment_says_something(root: Path) -> None:
    """`buf` asks for a comment; this asks that it is not only the name again."""
    empty = []
    for path in sorted((root / "protos/flexmarl").rglob("*.proto")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for comment, line in itertools.pairwise(lines):
            field = re.match(r"\s*(?:optional |repeated )?[\w.<>, ]+ (\w+) = \d+", line)
            said = re.match(r"\s*// (.*)", comment)
            if field and said:
                words = re.sub(r"[^a-z]", "", said[1].lower())
                if len(words) < 2:
                    empty.append(f"{path.name}: {field[1]}: {said[1]}")
    assert empty == []


@pytest.mark.parametrize("service", SERVICES)
def test_the_package_is_the_path(root: Path, service: str) -> None:
    folder = root / "protos/flexmarl/api" / service / "v1"
    paths = sorted(folder.glob("*.proto"))
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert f"package flexmarl.api.{service}.v1;" in text, path
