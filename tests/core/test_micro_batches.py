"""Rows leave the queue whole, oldest group first, each once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.micro_batches import RowQueue
from flexmarl.core.training_rows import Row


def row(name: str, num_tokens: int = 0) -> Row:
    return Row(
        vertex_id=name,
        sample_id="s",
        agent="a",
        policy="p",
        path="0:0",
        num_response_tokens=num_tokens,
    )


def ids(formed: list[tuple[Row, ...]]) -> list[list[str]]:
    return [[r.vertex_id for r in rows] for rows in formed]


def test_forms_when_full_and_flushes_the_rest() -> None:
    queue = RowQueue(rows_per_micro_batch=2)
    queue.add([row("c"), row("d")], group_ordinal=1)
    queue.add([row("a")], group_ordinal=0)
    assert ids(queue.form(flush=False)) == [["a", "c"]]
    assert len(queue) == 1
    assert ids(queue.form(flush=False)) == []
    assert ids(queue.form(flush=True)) == [["d"]]
    assert ids(queue.form(flush=True)) == []


def test_refuses_empty_micro_batches() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        RowQueue(rows_per_micro_batch=0)


def test_tokens_bound_a_micro_batch_and_a_long_row_goes_alone() -> None:
    queue = RowQueue(rows_per_micro_batch=3, tokens_per_micro_batch=10)
    queue.add([row("a", 4), row("b", 5)], group_ordinal=0)
    assert ids(queue.form(flush=False)) == []
    queue.add([row("c", 2), row("d", 30), row("e", 1)], group_ordinal=0)
    assert ids(queue.form(flush=False)) == [["a", "b"], ["c"], ["d"]]
    queue.add([row("f", 1), row("g", 1), row("h", 1)], group_ordinal=0)
    assert ids(queue.form(flush=False)) == [["e", "f", "g"]]
    assert ids(queue.form(flush=True)) == [["h"]]
    assert queue.num_tokens == 0


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_each_row_leaves_exactly_once(size: int, steps: list[tuple[int, bool]]) -> None:
    queue = RowQueue(rows_per_micro_batch=size)
    left: list[str] = []
    for number, (group, form) in enumerate(steps):
        queue.add([row(f"{number:03d}")], group_ordinal=group)
        if form:
            formed = ids(queue.form(flush=False))
            assert all(len(rows) == size for rows in formed)
            left.extend(i for rows in formed for i in rows)
    left.extend(i for rows in ids(queue.form(flush=True)) for i in rows)
    assert sorted(left) == [f"{number:03d}" for number in range(len(steps))]
