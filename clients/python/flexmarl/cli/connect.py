"""The store of a cluster that runs, or of stored data that is only looked at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.cli.cluster.attach import Addresses, addresses_of, find_running, parse_cluster
from flexmarl.cli.cluster.folder import ClusterFolder, read_json
from flexmarl.cli.cluster.local import LocalCluster
from flexmarl.cli.cluster.plan import STORE, ClusterSettings
from flexmarl.cli.errors import CliError
from flexmarl.cli.interrupt import Interrupted, InterruptGuard
from flexmarl.client.errors import NotFoundError
from flexmarl.client.run_store import RunStore
from flexmarl.core.errors import ErrorReason
from flexmarl.runtime.config import LogConfig
from flexmarl.runtime.logging import configure_logging

ResultT = TypeVar("ResultT")

_CONNECT_TIMEOUT_S: Final = 15.0
_NAMED_RUNS: Final = 5


@asynccontextmanager
async def connect_store(address: str) -> AsyncIterator[RunStore]:
    """Client of a store, and of all shards of the run that is read from it."""
    async with RunStore.connect(address) as store:
        await store.wait_ready(timeout_s=_CONNECT_TIMEOUT_S)
        yield store


def addresses_of_running(data_dir: Path, cluster: Sequence[str]) -> Addresses:
    """Addresses of a cluster that runs, its orchestrator among them.

    Raises:
        CliError: None runs in the folder, or the orchestrator was not named.
    """
    if cluster:
        addresses = parse_cluster(list(cluster))
        if not addresses.orchestrator:
            raise CliError("--cluster: name the orchestrator too: --cluster orchestrator=HOST:PORT")
        return addresses
    running = find_running(ClusterFolder(data_dir.resolve()))
    if running is None:
        raise CliError(
            f"{data_dir.resolve()}: no cluster runs there, so no run goes on there; "
            "how a run ended: flexmarl show RUN; to go on with one that was interrupted: "
            "flexmarl resume RUN"
        )
    return addresses_of(running)


def orchestrator_beside(folder: ClusterFolder, cluster: Sequence[str]) -> str:
    """Address of the orchestrator of a cluster that runs; empty where a store alone is there."""
    if cluster:
        return parse_cluster(list(cluster)).orchestrator
    running = find_running(folder)
    return "" if running is None else addresses_of(running).orchestrator


def with_store(
    use: Callable[[RunStore, ClusterFolder], Awaitable[ResultT]],
    *,
    data_dir: Path,
    cluster: Sequence[str],
) -> ResultT:
    """Run `use` on the store of a cluster; where none runs, on its stored data.

    Raises:
        CliError: There is neither a cluster nor data.
    """
    return asyncio.run(_with_store(use, ClusterFolder(data_dir.resolve()), list(cluster)))


def with_run(
    use: Callable[[RunStore, ClusterFolder, graph_pb2.Run], Awaitable[ResultT]],
    run_id: str,
    *,
    data_dir: Path,
    cluster: Sequence[str],
) -> ResultT:
    """Run `use` on a stored run, over all shards that it is spread over; see `with_store`.

    Raises:
        CliError: There is neither a cluster nor data, or no such run.
    """

    async def use_run(store: RunStore, folder: ClusterFolder) -> ResultT:
        return await use(store, folder, await store.get_run(run_id))

    return with_store(use_run, data_dir=data_dir, cluster=cluster)


async def _with_store(
    use: Callable[[RunStore, ClusterFolder], Awaitable[ResultT]],
    folder: ClusterFolder,
    cluster: list[str],
) -> ResultT:
    running = None if cluster else find_running(folder)
    if cluster:
        address = parse_cluster(cluster).store
    elif running is not None:
        address = addresses_of(running).store
    else:
        return await _with_own_store(use, folder)
    async with connect_store(address) as store:
        return await _naming_runs(use, store, folder)


async def _naming_runs(
    use: Callable[[RunStore, ClusterFolder], Awaitable[ResultT]],
    store: RunStore,
    folder: ClusterFolder,
) -> ResultT:
    """The result; where the run is not there, the error names those that are."""
    try:
        return await use(store, folder)
    except NotFoundError as error:
        if error.reason is not ErrorReason.RUN_NOT_FOUND:
            raise
        names = [run.run_id for run in await store.list_runs()]
        more = f" (and {len(names) - _NAMED_RUNS} more)" if len(names) > _NAMED_RUNS else ""
        stored = f"stored here: {', '.join(names[:_NAMED_RUNS])}{more}" if names else "none is here"
        raise CliError(f"{error.message}; {stored}") from None


async def _with_own_store(
    use: Callable[[RunStore, ClusterFolder], Awaitable[ResultT]], folder: ClusterFolder
) -> ResultT:
    if not folder.service(STORE).is_dir():
        raise CliError(
            f"{folder.path}: no cluster runs there and no runs are stored there; "
            "name the folder with --data-dir, or a cluster with --cluster"
        )
    configure_logging(LogConfig(file=folder.log("cli")), service="cli")
    settings = ClusterSettings.from_json(read_json(folder.settings_file) or {})
    store_only = LocalCluster(folder, settings, tell=lambda _: None, names=(STORE,))
    async with InterruptGuard() as guard:
        guard.on_second(store_only.kill)
        try:
            await guard.run(store_only.start())
            async with connect_store(store_only.address(STORE)) as store:
                return await guard.run(_naming_runs(use, store, folder))
        except Interrupted:
            raise KeyboardInterrupt from None
        finally:
            await store_only.stop()
