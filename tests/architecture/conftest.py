"""What the architecture tests look at."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's folder."""
    return ROOT


@pytest.fixture(scope="session")
def pyproject() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def import_roots(pyproject: dict[str, Any]) -> list[str]:
    """The import roots, as the editable install has them."""
    roots: list[str] = pyproject["tool"]["hatch"]["build"]["dev-mode-dirs"]
    return roots
