"""Which runs this process drives: a hint for its next start, in one small file.

Everything that counts is in the MEG Store; without the file a run is resumed by hand.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, order=True)
class OwnedRun:
    """A run and where its home shard is."""

    run_id: str
    shard: str
    address: str


class OwnedRuns:
    """The file `runs.json` of a data folder; each change replaces it whole."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / "runs.json"

    def read(self) -> list[OwnedRun]:
        """All runs; none where the file is missing or torn."""
        try:
            items = json.loads(self._path.read_text(encoding="utf-8"))
            return sorted(OwnedRun(**item) for item in items)
        except (OSError, ValueError, TypeError):
            return []

    def add(self, run: OwnedRun) -> None:
        """Remember a run, or its home shard's new address."""
        self._write([*(known for known in self.read() if known.run_id != run.run_id), run])

    def remove(self, run_id: str) -> None:
        """Forget a run."""
        self._write([known for known in self.read() if known.run_id != run_id])

    def _write(self, runs: list[OwnedRun]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        items = [{"run_id": run.run_id, "shard": run.shard, "address": run.address} for run in runs]
        temporary.write_text(json.dumps(items) + "\n", encoding="utf-8")
        temporary.replace(self._path)
