"""Fixtures: one store per backend, so that every rule is tested on both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from meg_store.store_harness import RUN, StoreProcess, a_run, serving

from flexmarl.client.store import StoreClient
from flexmarl.meg_store.shard import Shard


@pytest_asyncio.fixture(params=["memory", "rocks"])
async def opened(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[StoreClient, Shard]]:
    """A client and the shard behind it, without runs."""
    async with serving(tmp_path, backend=request.param) as pair:
        yield pair


@pytest_asyncio.fixture
async def store(opened: tuple[StoreClient, Shard]) -> StoreClient:
    """A client of a store that has a run."""
    await opened[0].create_run(a_run())
    return opened[0]


@pytest_asyncio.fixture
async def term(store: StoreClient) -> int:
    """The orchestrator's term of the run."""
    return await store.acquire_term(RUN, "orchestrator", holder="test")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[StoreProcess]:
    """A store process, not started; ended and cleaned up afterwards."""
    store = StoreProcess(tmp_path)
    yield store
    store.clean()
