from __future__ import annotations

from collections.abc import Iterator

import pytest
from orchestrator.cluster import Processes


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """One store and one orchestrator for all tests here: each test drives a run of its own."""
    shared = Processes(tmp_path_factory.mktemp("orchestrator"))
    try:
        shared.start()
        yield shared
    finally:
        shared.clean()
