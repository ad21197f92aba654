"""From a checked run to its folder: the part that `train` and `resume` share.

    cluster    the one in the folder, or a new local one that ends with this command
    begin      store and submit the run, or resume it
    follow     show and record every version until the run ends
    finish     plot, a Hugging Face folder per policy, a summary with the paths

The first Ctrl-C stops the run so that it can be resumed, then the cluster; the second kills.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.cli.clients import Clients, connect_cluster
from flexmarl.cli.cluster.attach import Addresses, addresses_of, find_running
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.cluster.local import LocalCluster
from flexmarl.cli.cluster.plan import ORCHESTRATOR, STORE, ClusterSettings
from flexmarl.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, CliError
from flexmarl.cli.follow import follow_run
from flexmarl.cli.interrupt import Interrupted, InterruptGuard
from flexmarl.cli.output import print_line
from flexmarl.cli.progress.outputs import RunOutputs, summary
from flexmarl.cli.progress.report import numbers_of
from flexmarl.cli.progress.view import View, make_view
from flexmarl.client.errors import FlexMarlError
from flexmarl.client.policies import export_policy
from flexmarl.core.errors import ErrorFamily, find_reason
from flexmarl.runtime.config import LogConfig
from flexmarl.runtime.logging import configure_logging
from flexmarl.runtime.run_config import RunConfig

ResultT = TypeVar("ResultT")

_STOP_TIMEOUT_S: Final = 10.0

_IN_THE_RUN: Final = frozenset({ErrorFamily.INVALID, ErrorFamily.USER_CODE})

_DURABILITY: Final = {
    "process": "durability process: what is stored survives every process, not the host",
    "fsync": "durability fsync: what is stored survives power loss",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run to bring to its end.

    Attributes:
        run_id: Id of the run.
        folder: Its folder, `runs/<id>`.
        cluster_folder: Folder of the local cluster.
        settings: What a new local cluster is started with.
        addresses: Cluster that the user named; None: a local one.
        begin: Stores and submits the run, or resumes it; returns its configuration.
        is_stored: Whether the store has the run already.
    """

    run_id: str
    folder: Path
    cluster_folder: ClusterFolder
    settings: ClusterSettings
    addresses: Addresses | None
    begin: Callable[[Clients], Awaitable[RunConfig]]
    is_stored: bool = False


@dataclass(slots=True)
class _Stored:
    """Whether there is a run to resume: one that was cut before it was stored is not there."""

    run: bool


async def run_job(job: Job) -> int:
    """Bring a run to its end; returns the exit code.

    Raises:
        CliError: The cluster does not start or cannot be kept running, or the run failed.
    """
    configure_logging(LogConfig(file=job.cluster_folder.log("cli")), service="cli")
    outputs = RunOutputs(job.folder)
    stored = _Stored(job.is_stored)
    view = make_view()
    async with InterruptGuard() as guard:
        guard.on_second(view.close)
        try:
            with view:
                progress = await _run(job, outputs, view, guard, stored)
        except Interrupted:
            print_line(_interrupted_line(job.run_id, stored))
            return EXIT_INTERRUPTED
        finally:
            outputs.close()
    return _verdict(job, progress, outputs)


async def _run(
    job: Job, outputs: RunOutputs, view: View, guard: InterruptGuard, stored: _Stored
) -> orchestrator_pb2.RunProgress:
    async with (
        _cluster(job, view, guard) as (addresses, failed),
        connect_cluster(addresses) as clients,
    ):
        work = _first(_train(job, clients, outputs, view, stored), failed)
        try:
            return await guard.run(work)
        except Interrupted:
            view.say("stopping the run ...")
            await _stop_run(clients, job.run_id)
            raise


@asynccontextmanager
async def _cluster(
    job: Job, view: View, guard: InterruptGuard
) -> AsyncIterator[tuple[Addresses, Awaitable[None]]]:
    """Addresses of the cluster to use, and what ends when it can no longer be used."""
    found = job.addresses
    running = find_running(job.cluster_folder) if found is None else None
    if running is not None and running.background:
        view.say(f"using the cluster of process {running.pid} in {job.cluster_folder.path}")
        found = addresses_of(running)
    if found is not None:
        yield found, asyncio.get_running_loop().create_future()
        return
    cluster = LocalCluster(job.cluster_folder, job.settings, tell=view.say)
    guard.on_second(cluster.kill)
    try:
        view.say(f"starting the cluster, {_DURABILITY[job.settings.durability]} ...")
        await guard.run(cluster.start())
        yield Addresses(cluster.address(STORE), cluster.address(ORCHESTRATOR)), cluster.failed()
    finally:
        await cluster.stop()


async def _train(
    job: Job, clients: Clients, outputs: RunOutputs, view: View, stored: _Stored
) -> orchestrator_pb2.RunProgress:
    config = await job.begin(clients)
    stored.run = True
    outputs.open(config)
    view.say(f"run {job.run_id}")

    def on_message(message: orchestrator_pb2.WatchProgressResponse) -> None:
        if message.reports and not outputs.history:
            # The file comes with the first version: a run that fails before it leaves none.
            view.say(f"metrics in {outputs.metrics_file}")
        for report in message.reports:
            outputs.add(numbers_of(report))
        view.update(message)

    progress = await follow_run(
        clients.orchestrator, job.run_id, home_shard=clients.home_shard, on_message=on_message
    )
    await asyncio.to_thread(outputs.plot)
    if progress.status == common_pb2.RUN_STATUS_FINISHED:
        for policy in sorted(config.policies):
            await export_policy(
                clients.store,
                job.run_id,
                policy,
                out=outputs.policy_folder(policy),
                cache_dir=job.cluster_folder.cache,
                replace=True,
            )
    return progress


async def _stop_run(clients: Clients, run_id: str) -> None:
    # The run is resumable without this, too; asking makes its state say so.
    with contextlib.suppress(FlexMarlError, TimeoutError):
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await clients.orchestrator.stop_run(run_id)


async def _first(work: Awaitable[ResultT], failed: Awaitable[None]) -> ResultT:
    """The result of the work, or the failure of the cluster under it."""
    working, failing = asyncio.ensure_future(work), asyncio.ensure_future(failed)
    try:
        await asyncio.wait({working, failing}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            failing.result()
        return await working
    finally:
        for task in (working, failing):
            task.cancel()
        await asyncio.gather(working, failing, return_exceptions=True)


def _verdict(job: Job, progress: orchestrator_pb2.RunProgress, outputs: RunOutputs) -> int:
    if progress.status == common_pb2.RUN_STATUS_FAILED:
        raise CliError(failed_line(progress), exit_code=EXIT_FAILED)
    for line in summary(outputs.history):
        print_line(line)
    for line in _paths(outputs):
        print_line(line)
    if progress.status == common_pb2.RUN_STATUS_STOPPED:
        print_line(f"stopped at version {progress.version}: flexmarl resume {job.run_id}")
        return EXIT_FAILED
    return 0


def _interrupted_line(run_id: str, stored: _Stored) -> str:
    if stored.run:
        return f"interrupted; go on with: flexmarl resume {run_id}"
    return "interrupted before the run was stored: train again"


def failed_line(progress: orchestrator_pb2.RunProgress) -> str:
    """Why a run failed, and what to do about it."""
    failure = progress.failure
    reason = find_reason(failure.reason)
    remedy = f"go on with: flexmarl resume {progress.run_id}"
    if reason is not None and reason.family in _IN_THE_RUN:
        mend = "mend it and train again: a stored run keeps its code and configuration"
        # What had worked before may have failed for a cause outside of the code.
        remedy = f"{mend}; or, if the code is right, {remedy}" if progress.version else mend
    return (
        f"run {progress.run_id} failed at version {progress.version}: {failure.message} "
        f"({failure.reason}); {remedy}"
    )


def _paths(outputs: RunOutputs) -> list[str]:
    labelled = [
        ("config", outputs.config_file),
        ("metrics", outputs.metrics_file),
        ("plot", outputs.plot_file),
    ]
    folders = sorted((outputs.folder / "policies").glob("*"))
    labelled += [(f"policy {folder.name}", folder) for folder in folders]
    return [f"{label}: {path}" for label, path in labelled if path.exists()]
