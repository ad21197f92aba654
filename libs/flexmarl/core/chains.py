"""Turns of a conversation as one row: an agent's calls whose prompts continue one another.

Vertex B extends A when its prompt begins with A's prompt and response, token by token. A chain of
such vertices holds every token of its members once, in its last vertex: trained as one row, each
token goes through the model once instead of once per later turn. Which vertices make a chain is
fixed when their group closes (`merged_into`); a vertex is in one chain. Where several vertices
extend the same one, the longest chain has it, and the others begin anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from flexmarl.core.training_rows import Row, RowAdvantage


def chained(released: Sequence[RowAdvantage]) -> tuple[RowAdvantage, ...]:
    """Released rows with the chains that they make.

    Args:
        released: Rows of one group that are about to be released.
    """
    if not any(item.row.extends for item in released):
        return tuple(released)
    by_id = {item.row.vertex_id: item.row for item in released}
    into: dict[str, str] = {}
    free = set(by_id)
    # The longest first; vertex ids settle ties, so that a repeated closure is the same.
    for row in sorted(by_id.values(), key=lambda row: (-row.num_tokens, row.vertex_id)):
        if row.vertex_id not in free:
            continue
        free.discard(row.vertex_id)
        before = by_id.get(row.extends)
        while before is not None and before.vertex_id in free:
            free.discard(before.vertex_id)
            into[before.vertex_id] = row.vertex_id
            before = by_id.get(before.extends)
    return tuple(
        replace(item, row=replace(item.row, merged_into=into.get(item.row.vertex_id, "")))
        for item in released
    )


def folded(rows: Iterable[Row]) -> list[Row]:
    """Rows to train: the last vertex of each chain stands for it and holds the earlier ones."""
    rows = list(rows)
    earlier: dict[str, list[Row]] = {}
    for row in rows:
        if row.merged_into:
            earlier.setdefault(row.merged_into, []).append(row)
    if not earlier:
        return rows
    return [
        replace(row, earlier=tuple(sorted(earlier.get(row.vertex_id, ()), key=_length)))
        for row in rows
        if not row.merged_into
    ]


def _length(row: Row) -> int:
    return row.num_tokens
