"""The make file and the texts agree on the commands that exist."""

from __future__ import annotations

import re
from pathlib import Path


def targets(root: Path) -> set[str]:
    text = (root / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z0-9-]*):", text, flags=re.MULTILINE))


def test_the_texts_name_targets_that_exist(root: Path) -> None:
    named = {
        word
        for path in [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")]
        for word in re.findall(r"`make ([a-z][a-z0-9-]*)", path.read_text(encoding="utf-8"))
    }
    assert named - targets(root) == set()
    assert {"demo", "test"} <= named


def test_ci_runs_the_newcomers_commands(root: Path) -> None:
    script = (root / ".ci/run").read_text(encoding="utf-8")
    assert script.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in script
    assert re.search(r"^make test$", script, flags=re.MULTILINE)
    assert re.search(r"^make demo$", script, flags=re.MULTILINE)
