"""How the rows of a micro-batch are dealt to ranks, and cut into forward passes and tiles of them.

Every rank runs the same number of passes, because each pass holds collectives: an unequal number
hangs the group. A rank without rows left gets an empty pass, which it runs with weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Pass = tuple[int, ...]
"""Indexes of the rows of one pass; empty means a pass of weight 0."""


def plan_passes(
    lengths: Sequence[int], *, world_size: int, max_tokens: int
) -> tuple[tuple[Pass, ...], ...]:
    """Returns the passes of each rank, equally many per rank and at least one.

    Rows are sorted by length, so that those of a pass are about equally long, and dealt back and
    forth, so that ranks get about equal work. One longer than `max_tokens` has a pass of its own.

    Args:
        lengths: Tokens per row.
        world_size: Number of ranks.
        max_tokens: Most tokens per pass.
    """
    dealt: list[list[int]] = [[] for _ in range(world_size)]
    for position, row in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        lap, place = divmod(position, world_size)
        dealt[place if lap % 2 == 0 else world_size - 1 - place].append(row)
    plans = [_cut(rows, lengths, max_tokens) for rows in dealt]
    count = max(1, *(len(plan) for plan in plans))
    return tuple(tuple(plan + [()] * (count - len(plan))) for plan in plans)


def _cut(rows: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[Pass]:
    passes: list[Pass] = []
    current: list[int] = []
    held = 0
    for row in rows:
        if current and held + lengths[row] > max_tokens:
            passes.append(tuple(current))
            current, held = [], 0
        current.append(row)
        held += lengths[row]
    if current:
        passes.append(tuple(current))
    return passes


@dataclass(frozen=True, slots=True)
class Tile:
    """Some consecutive rows of a pass whose scored tokens are dealt with together.

    Attributes:
        first_row: Number of its first row in the pass.
        num_rows: Rows.
        start: First of its scored tokens in the pass.
        end: Behind its last one.
    """

    first_row: int
    num_rows: int
    start: int
    end: int


def cut_tiles(row_ends: Sequence[int], *, max_tokens: int) -> tuple[Tile, ...]:
    """Returns the tiles of a pass, in order: as many whole rows as fit, and at least one.

    Args:
        row_ends: Where each row's scored tokens end.
        max_tokens: Most tokens of a tile of more than one row.
    """
    tiles = []
    first = start = 0
    for row, end in enumerate((*row_ends[1:], None), 1):
        if end is None or end - start > max_tokens:
            tiles.append(Tile(first, row - first, start, row_ends[row - 1]))
            first, start = row, row_ends[row - 1]
    return tuple(tiles)
