"""How the rows of a micro-batch are dealt to ranks and cut into forward passes.

Every rank runs the same number of passes, because each pass holds collectives: an unequal number
hangs the group. A rank without rows left gets an empty pass, which it runs with weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence

Pass = tuple[int, ...]
"""Indexes of the rows of one pass; empty means a pass of weight 0."""


def plan_passes(
    lengths: Sequence[int], *, world_size: int, max_tokens: int
) -> tuple[tuple[Pass, ...], ...]:
    """Returns the passes of each rank, equally many per rank and at least one.

    Rows are sorted by length, so that a pass pads little, and dealt back and forth, so that ranks
    get about equal work. A row longer than `max_tokens` gets a pass of its own.

    Args:
        lengths: Tokens per row.
        world_size: Number of ranks.
        max_tokens: Most tokens per pass, padding included.
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
    for row in rows:
        # Sorted: the first row of a pass is its longest and sets the padded width.
        if current and lengths[current[0]] * (len(current) + 1) > max_tokens:
            passes.append(tuple(current))
            current = []
        current.append(row)
    if current:
        passes.append(tuple(current))
    return passes
