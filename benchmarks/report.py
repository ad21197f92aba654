"""What benchmarks report: a table for people, one JSON object per figure for machines."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number.

    Attributes:
        name: Such as `store.write_read_p50_ms`.
        value: The number, in `unit`.
        unit: Such as `ms` or `1/s`; `ratio` for plain ratios.
        against: What it was compared with in the same run, in words; empty without a comparison.
        ratio: The comparison: value / the other's value, or the other way for rates; None without.
        bound: What is asked for, such as `<= 2.0`; shown in the table only.
    """

    name: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    bound: str = ""

    def as_json(self) -> str:
        """The figure as one line of JSON."""
        fields: dict[str, Any] = {"name": self.name, "value": self.value, "unit": self.unit}
        if self.against:
            fields["against"] = self.against
        if self.ratio is not None:
            fields["ratio"] = self.ratio
        return json.dumps(fields)


@dataclass(slots=True)
class Report:
    """Collects figures: each goes out as JSON at once, the table at the end."""

    out: TextIO = sys.stdout
    err: TextIO = sys.stderr
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        against: str = "",
        ratio: float | None = None,
        bound: str = "",
    ) -> None:
        """Reports one number; see `Figure`."""
        figure = Figure(
            name=name, value=value, unit=unit, against=against, ratio=ratio, bound=bound
        )
        self.figures.append(figure)
        print(figure.as_json(), file=self.out, flush=True)

    def note(self, text: str) -> None:
        """Reports a line that stands under the table: a floor, a condition, what is missing."""
        self.notes.append(text)

    def progress(self, text: str) -> None:
        """Says on the error stream what is being measured."""
        print(text, file=self.err, flush=True)

    def close(self) -> None:
        """Prints the table and the notes."""
        width = None if self.err.isatty() else 140
        console = Console(file=self.err, width=width)
        if self.figures:
            console.print(_table(self.figures))
        for note in [*self.notes, machine()]:
            console.print(note, highlight=False, markup=False)


def _table(figures: list[Figure]) -> Table:
    table = Table("figure", "value", "unit", "asked", "ratio", "against")
    table.columns[0].no_wrap = True
    table.columns[1].justify = table.columns[4].justify = "right"
    for figure in figures:
        ratio = "" if figure.ratio is None else f"{figure.ratio:.3g}"
        value = f"{figure.value:,.4g}" if abs(figure.value) < 1000 else f"{figure.value:,.0f}"
        table.add_row(figure.name, value, figure.unit, figure.bound, ratio, figure.against)
    return table


def machine() -> str:
    """One line on what the figures were measured with."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model n")]
        model = names[0] if names else model
    except OSError:
        pass
    return (
        f"Measured on {os.cpu_count()} x {model}, Python {platform.python_version()}; five million "
        f"turns of an empty loop take {_pace_s():.2f} s of CPU"
    )


def _pace_s() -> float:
    """What a machine that is shared gives at this hour: its figures swing by a factor of two."""
    before = time.process_time()
    for _ in range(5_000_000):
        pass
    return time.process_time() - before
