"""Fixtures of several files: processes that run user code, and the services with runs of a team."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rollout.dispatcher_harness import Cluster, Services
from rollout.team_kit import AGENTS, TEAM
from rollout.worker_harness import PRELOAD, Bench, run_config, write_model, write_team

from flexmarl.runtime.children import Children


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def children() -> AsyncIterator[Children]:
    """Starts the children of a file's tests."""
    async with Children(preload=PRELOAD) as owner:
        yield owner


@pytest.fixture
def bench(children: Children, tmp_path: Path) -> Bench:
    """Starts workers on one module text."""
    return Bench(children, tmp_path)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """A store and a dispatcher, for all tests of a file."""
    shared = Services(tmp_path_factory.mktemp("services"), host_grace_s=1.5)
    yield shared
    shared.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def make(tmp_path: Path, services: Services) -> Callable[..., Cluster]:
    """Makes runs around one module text."""
    await services.revive()

    def build(source: str = TEAM, **sections: Any) -> Cluster:
        config = run_config(
            write_model(tmp_path / "model"),
            write_team(tmp_path / "package", source),
            **{"agents": AGENTS, **sections},
        )
        return Cluster(services, config)

    return build
