"""What tests of the GSM8K example share."""

from __future__ import annotations

import os
from pathlib import Path

POLICIES = ("solver", "verifier", "refiner")


def dataset() -> Path:
    """GSM8K where it is; else a few questions of the same form."""
    path = Path(os.environ.get("FLEXMARL_GSM8K_DATA", ""))
    return path if path.is_file() else Path(__file__).parent / "examples/questions.jsonl"
