"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def print_json(value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Print JSON to standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_line(line: str) -> None:
    """Print a line to standard output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def print_table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """Print rows under column names; the width is that of the longest value, nothing is cut."""
    table = [list(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[index]) for line in table) for index in range(len(columns))]
    for line in table:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print_line("  ".join(cells).rstrip())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)
