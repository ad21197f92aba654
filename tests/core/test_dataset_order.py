"""The cursor is exact: nothing is skipped, nothing is taken twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.dataset_order import Cursor, DatasetOrder


def test_a_pass_takes_every_row_once() -> None:
    order = DatasetOrder(7, seed=3, shuffle=True)
    rows, cursor = order.take(Cursor(), 7)
    assert sorted(rows) == list(range(7))
    assert cursor == Cursor(1, 0)


def test_passes_differ_and_repeat_by_seed() -> None:
    first = DatasetOrder(50, seed=1, shuffle=True)
    again = DatasetOrder(50, seed=1, shuffle=True)
    other = DatasetOrder(50, seed=2, shuffle=True)
    assert first.take(Cursor(), 100) == again.take(Cursor(), 100)
    assert first.take(Cursor(), 50) != other.take(Cursor(), 50)
    assert first.take(Cursor(0), 50)[0] != first.take(Cursor(1), 50)[0]


def test_without_shuffle_rows_come_as_they_stand() -> None:
    assert DatasetOrder(3, seed=1, shuffle=False).take(Cursor(), 5)[0] == (0, 1, 2, 0, 1)


def test_an_empty_dataset_has_no_order() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        DatasetOrder(0, seed=0, shuffle=True)


def test_the_last_pass_has_an_end() -> None:
    assert DatasetOrder(5, seed=1, shuffle=True).left(Cursor(3, 1)) is None
    order = DatasetOrder(5, seed=1, shuffle=True, epochs=2)
    assert [order.left(c) for c in (Cursor(), Cursor(1, 3), Cursor(2, 0), Cursor(7, 1))] == [
        10,
        2,
        0,
        0,
    ]


@given(st.integers(1, 20), st.lists(st.integers(0, 30), max_size=8))
def test_taking_in_parts_is_taking_at_once(num_rows: int, parts: list[int]) -> None:
    order = DatasetOrder(num_rows, seed=5, shuffle=True)
    cursor = Cursor()
    taken: list[int] = []
    for count in parts:
        rows, cursor = order.take(cursor, count)
        taken.extend(rows)
    assert (tuple(taken), cursor) == order.take(Cursor(), sum(parts))
