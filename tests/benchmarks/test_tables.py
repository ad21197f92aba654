"""The page of benchmarks says what was recorded."""

from __future__ import annotations

import pytest

from benchmarks.tables import document, merged


def test_figures_become_tables_and_notes_stand_under_them() -> None:
    page = document(
        [
            '{"name": "pipeline.ma.step_vs_bound", "value": 1.2345, "unit": "ratio"}\n',
            '{"name": "store.rows_per_s", "value": 30500, "unit": "1/s", "against": "a floor", '
            '"ratio": 0.912}\n',
            "\n",
            '{"note": "two cores, load 1.0"}\n',
        ]
    )
    assert "## pipeline, ma\n" in page
    assert "| `pipeline.ma.step_vs_bound` | 1.234 ratio |  |  |" in page
    assert "| `store.rows_per_s` | 30,500 1/s | a floor | 0.91 |" in page
    assert page.endswith("## Notes\n\n- two cores, load 1.0\n")


def test_what_is_no_figure_is_refused() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        document(["pipeline 3\n"])


def test_a_new_figure_takes_the_place_of_the_old_one() -> None:
    recorded = ['{"name": "a.b", "value": 1, "unit": "s"}', '{"note": "alone"}']
    new = [
        '{"name": "a.c", "value": 2, "unit": "s"}\n',
        '{"name": "a.b", "value": 3, "unit": "s"}\n',
    ]
    assert merged(recorded, new) == [new[1].strip(), recorded[1], new[0].strip()]
