"""Numbers of other implementations; tests that need them skip where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

VECTORS = Path(__file__).parents[2] / "shared" / "data" / "vectors.json"


def peer(name: str) -> dict[str, Any]:
    """Returns {"in": ..., "out": ...} of one entry."""
    if not VECTORS.exists():
        pytest.skip(f"{VECTORS} is not there: numbers of peers cannot be compared")
    vectors = json.loads(VECTORS.read_text())["vectors"]
    return next(vector for vector in vectors if vector["name"] == name)
