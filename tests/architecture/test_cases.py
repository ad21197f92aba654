"""docs/cases.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

NAMED = re.compile(r"`(tests/[a-z_0-9/]+\.py)::([A-Za-z_0-9:]+)`")


def test_every_named_test_exists(root: Path) -> None:
    named = NAMED.findall((root / "docs/cases.md").read_text(encoding="utf-8"))
    assert len(named) > 40
    missing = []
    for file, name in named:
        path = root / file
        parts = name.split("::")
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not all(re.search(rf"^\s*(class|async def|def) {part}\b", text, re.M) for part in parts):
            missing.append(f"{file}::{name}")
    assert missing == []
