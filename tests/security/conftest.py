"""One set of certificates and tokens for all tests of locked doors."""

from __future__ import annotations

from pathlib import Path

import pytest
from locks import Locks, has_openssl


@pytest.fixture(scope="session")
def locks(tmp_path_factory: pytest.TempPathFactory) -> Locks:
    """Friends of the cluster."""
    if not has_openssl():
        pytest.skip("there is no openssl command to make certificates with")
    return Locks.made_in(tmp_path_factory.mktemp("locks"))


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Locks:
    """People of another authority."""
    return Locks.made_in(tmp_path_factory.mktemp("strangers"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"
