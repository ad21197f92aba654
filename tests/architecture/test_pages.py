"""Documents that show tables of the code show those that decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.generate_pages import PAGES


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_page_is_generated_from_the_tables(root: Path, name: str) -> None:
    assert (root / name).read_text(encoding="utf-8") == PAGES[name](), (
        "run `make pages` (scripts/generate_pages.py) and commit what it changes"
    )
