"""Which rows are used, and which are held out."""

from __future__ import annotations

import pytest

from flexmarl.core.dataset_rows import RowFilter, first_overlap, is_held_out


@pytest.mark.parametrize(
    ("op", "value", "kept"),
    [
        ("==", 3, [3]),
        ("!=", 3, [1, 2]),
        ("<", 2, [1]),
        ("<=", 2, [1, 2]),
        (">", 2, [3]),
        (">=", 2, [2, 3]),
        ("in", [1, 3], [1, 3]),
        ("not in", [1, 3], [2]),
    ],
)
def test_filters_compare(op, value, kept) -> None:
    rows = [{"level": level} for level in (1, 2, 3)]
    keeps = RowFilter("level", op, value).keeps
    assert [row["level"] for row in rows if keeps(row)] == kept


def test_a_row_without_the_column_is_left_out() -> None:
    assert not RowFilter("level", "!=", 3).keeps({"other": 1})


def test_what_cannot_be_compared_is_named() -> None:
    with pytest.raises(ValueError, match=r"column 'level' holds 'hard'.*by '<'"):
        RowFilter("level", "<", 3).keeps({"level": "hard"})


def test_a_share_is_held_out_by_content() -> None:
    rows = [str(number).encode() for number in range(2000)]
    held_out = [row for row in rows if is_held_out(row, seed=1, fraction=0.25)]
    assert 400 < len(held_out) < 600
    assert held_out == [row for row in rows if is_held_out(row, seed=1, fraction=0.25)]
    assert held_out != [row for row in rows if is_held_out(row, seed=2, fraction=0.25)]
    # A larger share holds out the same ones and more.
    assert set(held_out) < {row for row in rows if is_held_out(row, seed=1, fraction=0.5)}


def test_an_overlap_is_found_by_content() -> None:
    assert first_overlap([b"a", b"b"], [b"c"]) is None
    assert first_overlap([b"a", b"b"], [b"c", b"b"]) == (1, 1)
