"""Images, built once for all tests of containers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from compose.compose_kit import Containers, what_is_missing

Cluster = Callable[..., AbstractContextManager[Containers]]


@pytest.fixture(scope="session")
def cluster_of(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Brings services up, with further compose files, and removes all of it again."""
    missing = what_is_missing()
    if missing:
        assert "FLEXMARL_COMPOSE_REQUIRED" not in os.environ, missing
        pytest.skip(missing)
    built = "FLEXMARL_COMPOSE_BUILT" in os.environ

    @contextmanager
    def up(services: Sequence[str], files: Sequence[Path] = ()) -> Iterator[Containers]:
        nonlocal built
        project = f"flexmarl-test-{uuid4().hex[:6]}"
        containers = Containers(project, tmp_path_factory.mktemp("runs"), files=files)
        if not built:
            containers.build()
            built = True
        try:
            containers.up(*services)
            yield containers
        finally:
            containers.down()

    return up
