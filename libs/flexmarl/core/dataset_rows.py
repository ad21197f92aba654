"""Which rows of a dataset are used, and which of them are held out for evaluation.

A row is held out by what it says, not by where it stands: the same row twice is on one side, and a
row that is added later moves no other one.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flexmarl.core.seeds import derive

_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda found, wanted: found in wanted,
    "not in": lambda found, wanted: found not in wanted,
}
_SHARES: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Keeps rows whose column compares so with a value."""

    column: str
    op: str
    value: Any

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Whether a row passes; one without the column does not.

        Raises:
            ValueError: The two cannot be compared; names the column.
        """
        if self.column not in row:
            return False
        found = row[self.column]
        try:
            return bool(_COMPARE[self.op](found, self.value))
        except TypeError:
            raise ValueError(
                f"dataset.filters: column {self.column!r} holds {found!r}, which does not compare "
                f"with {self.value!r} by {self.op!r}"
            ) from None


def is_held_out(row: bytes, *, seed: int, fraction: float) -> bool:
    """Whether a row belongs to the held-out share.

    Args:
        row: The row as canonical JSON.
        seed: Of the run.
        fraction: Share of all rows, in (0, 1).
    """
    return derive(seed, "held out", content_key(row)) < fraction * _SHARES


def content_key(row: bytes) -> str:
    """What two rows of the same content have in common."""
    return hashlib.blake2b(row, digest_size=16).hexdigest()


def first_overlap(training: Iterable[bytes], held_out: Sequence[bytes]) -> tuple[int, int] | None:
    """Place in each of a row that both have, from 0; None when they have none in common."""
    places = {content_key(row): place for place, row in enumerate(held_out)}
    for place, row in enumerate(training):
        other = places.get(content_key(row))
        if other is not None:
            return place, other
    return None
