"""The contracts: generated code is what the protos say, comments are there, names follow rules."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_buf_accepts_names_and_comments(root: Path) -> None:
    tool = Path(sys.executable).with_name("buf")
    done = subprocess.run(
        [tool, "lint"], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
    folder = root / "protos/flexmarl/api" / service / "v1alpha1"
    paths = sorted(folder.glob("*.proto"))
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert f"package flexmarl.api.{service}.v1alpha1;" in text, path
