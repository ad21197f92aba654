"""What engines without a model of their own need to know of a model folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderShape:
    """What config.json says; None where it does not."""

    vocab_size: int | None
    max_context: int | None

    def context(self, wanted: int, *, default: int) -> int:
        """Longest prompt plus response: what is wanted (0: all), within the model's limit."""
        limit = self.max_context or wanted or default
        return min(wanted or limit, limit)


def read_shape(folder: Path) -> FolderShape:
    """Vocabulary and context of a model folder; of its text part, where it has several."""
    config = _read(folder)
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text}
    return FolderShape(
        vocab_size=_positive(config.get("vocab_size")),
        max_context=_positive(config.get("max_position_embeddings")),
    )


def _read(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
