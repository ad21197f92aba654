from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from trainer.harness import Ranks, start_ranks, write_model
from trainer.service_harness import Cluster, start_cluster


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ranks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ranks]:
    async with start_ranks(2, tmp_path_factory.mktemp("segments")) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def started_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with start_cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(started_cluster: Cluster) -> AsyncIterator[Cluster]:
    yield started_cluster
    await started_cluster.close_runs()
