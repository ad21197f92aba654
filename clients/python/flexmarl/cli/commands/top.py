"""`flexmarl top`: a run that goes on, as a screen that is drawn anew, once, or as JSON."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.cli.commands.runs import status_name
from flexmarl.cli.connect import addresses_of_running, connect_store
from flexmarl.cli.errors import CliError
from flexmarl.cli.output import print_json
from flexmarl.cli.progress.live import HISTORY, LiveView, instance_state, render
from flexmarl.cli.progress.report import VersionNumbers, numbers_of
from flexmarl.client.errors import NotFoundError, UnavailableError
from flexmarl.client.orchestrator import OrchestratorClient

_PATIENCE_S: Final = 2.0
_CALL_TIMEOUT_S: Final = 10.0
_INTERVAL_MS: Final = 500

Message = orchestrator_pb2.WatchProgressResponse


def top(run_id: str, *, data_dir: Path, cluster: Sequence[str], once: bool, as_json: bool) -> int:
    """Show a run until it ends, or once; returns the exit code.

    Args:
        run_id: Run; empty: the one that goes on, or the newest.
        data_dir: Folder of a local cluster.
        cluster: Addresses of another one.
        once: Show it and end; also where the output is no terminal.
        as_json: Print one JSON object instead.

    Raises:
        CliError: No cluster runs, no run is stored, or the orchestrator does not drive it.
    """
    addresses = addresses_of_running(data_dir, cluster)
    run_id = run_id or asyncio.run(_newest(addresses.store))
    try:
        if as_json or once or not sys.stdout.isatty():
            message = asyncio.run(_first(run_id, addresses.orchestrator))
            _print(message, as_json=as_json)
        else:
            asyncio.run(_show(run_id, addresses.orchestrator))
    except NotFoundError as error:
        raise CliError(
            f"{error.message}: flexmarl resume {run_id}; how it ended: flexmarl show {run_id}"
        ) from None
    except (UnavailableError, TimeoutError):
        raise CliError(
            f"the orchestrator at {addresses.orchestrator} does not answer; see flexmarl status"
        ) from None
    return 0


async def _newest(store_address: str) -> str:
    async with connect_store(store_address) as store:
        runs = await store.list_runs()
    if not runs:
        raise CliError("no run is stored here: start one with flexmarl train CONFIG")
    going_on = (run for run in runs if run.status == common_pb2.RUN_STATUS_RUNNING)
    return next(going_on, runs[0]).run_id


async def _messages(run_id: str, address: str) -> AsyncGenerator[Message, None]:
    """The state twice a second, at first with the newest reports; ends with the run."""
    async with OrchestratorClient.connect(address, patience_s=_PATIENCE_S) as orchestrator:
        now = await orchestrator.get_run_status(run_id)
        watched = orchestrator.watch_progress(
            run_id, from_version=max(now.version - HISTORY, 0), interval_ms=_INTERVAL_MS
        )
        async with aclosing(watched) as messages:
            async for message in messages:
                yield message


async def _first(run_id: str, address: str) -> Message:
    async with asyncio.timeout(_CALL_TIMEOUT_S), aclosing(_messages(run_id, address)) as messages:
        return await anext(messages)


async def _show(run_id: str, address: str) -> None:
    from rich.console import Console

    with LiveView(Console(), timed=False) as view:
        async with aclosing(_messages(run_id, address)) as messages:
            async for message in messages:
                view.update(message)


def _print(message: Message, *, as_json: bool) -> None:
    history = [numbers_of(report) for report in message.reports]
    if as_json:
        print_json(_as_json(message.progress, history[-1] if history else None))
        return
    from rich.console import Console

    Console().print(render(message.progress, history))


def _as_json(
    progress: orchestrator_pb2.RunProgress, newest: VersionNumbers | None
) -> dict[str, Any]:
    return {
        "run": progress.run_id,
        "status": status_name(progress.status),
        "version": progress.version,
        "versions": progress.num_versions,
        "stage": progress.stage,
        "groups": {"closed": progress.num_groups_closed, "all": progress.num_groups},
        "samples": {"ended": progress.num_samples_ended, "all": progress.num_samples},
        "policies": {
            name: {
                "waiting": progress.queues[name].num_waiting if name in progress.queues else 0,
                "running": progress.queues[name].num_running if name in progress.queues else 0,
                "rows_waiting": progress.rows_waiting.get(name, 0),
            }
            for name in sorted({*progress.queues, *progress.rows_waiting})
        },
        "instances": [
            {
                "instance": instance.instance_id,
                "host": instance.host_id,
                "policies": list(instance.policies),
                "state": instance_state(instance.state),
                "version": instance.version,
                "running": instance.num_running,
                "busy": round(instance.busy_fraction, 3),
            }
            for instance in progress.instances
        ],
        "slots": [
            {
                "slot": slot.slot,
                "policy": slot.policy or None,
                "activity": slot.activity or None,
                "busy_s": round(slot.busy_s, 3),
            }
            for slot in progress.slots
        ],
        "newest": None if newest is None else newest.to_json(),
        "waits": [
            {"what": wait.what, "waited_s": wait.waited_ms / 1e3, "ends": wait.ends}
            for wait in progress.reasons
        ],
    }
