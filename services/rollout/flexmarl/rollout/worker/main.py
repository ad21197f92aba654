"""A workflow worker: a child process of the dispatcher that runs user code.

It waits for frames of its link (freed by a frame; the closing of the link ends the process, I15)
and runs many samples at once on one event loop, with a task factory that gives calls stable ids.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import uvloop

from flexmarl.api.rollout.v1.worker_pb2 import (
    WorkerCommand,
    WorkerReady,
    WorkerSample,
    WorkerSetup,
)
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.worker import failures, user_code
from flexmarl.rollout.worker.confine import confine
from flexmarl.rollout.worker.outbox import Outbox
from flexmarl.rollout.worker.sample import SampleRun
from flexmarl.rollout.worker.tasks import sample_task_factory
from flexmarl.rollout.worker.tool_threads import ToolThreads
from flexmarl.rollout.worker.user_code import UserCode
from flexmarl.rollout.worker.watchdog import Watchdog
from flexmarl.runtime.child_link import AsyncChildLink
from flexmarl.runtime.config import LogConfig
from flexmarl.runtime.logging import configure_logging
from flexmarl.runtime.main import GC_THRESHOLDS

ItemT = TypeVar("ItemT")

_PIECE: Final = 128
"""Samples that are taken a step on before what they ask for is sent."""


def run(args: dict[str, Any]) -> int:
    """Entry point of the forked child.

    Args:
        args: `report`: file for the watchdog; `log` and `limits`: the service's sections `log` and
            `user_code`.
    """
    configure_logging(LogConfig.model_validate(args["log"]), service="rollout-worker")
    confine(args["limits"])
    gc.set_threshold(*GC_THRESHOLDS)
    uvloop.run(_serve(Path(args["report"])))
    return 0


async def _serve(report: Path) -> None:
    loop = asyncio.get_running_loop()
    link = await AsyncChildLink.from_environment()
    outbox = Outbox(link.send)
    pump = asyncio.create_task(outbox.pump(), name="outbox")
    worker: Worker | None = None
    async for frame in link:
        command = WorkerCommand.FromString(frame)
        if command.HasField("setup"):
            user = _set_up(command.setup, outbox)
            if user is not None:
                loop.set_task_factory(sample_task_factory)  # type: ignore[arg-type]
                worker = Worker(user, outbox=outbox, report=report)
        if worker is not None:
            await worker.handle(command)
    pump.cancel()


def _set_up(setup: WorkerSetup, outbox: Outbox) -> UserCode | None:
    ready = WorkerReady()
    user: UserCode | None = None
    try:
        user = user_code.load(
            config_json=setup.config_json,
            workflow_path=setup.workflow_path,
            model_paths=setup.model_paths,
        )
    except DomainError as error:
        ready.failure.CopyFrom(failures.failure(error.reason, error.message, **error.metadata))
    outbox.event().ready.CopyFrom(ready)
    return user


class Worker:
    """The samples of one worker process."""

    def __init__(self, user: UserCode, *, outbox: Outbox, report: Path) -> None:
        self._user = user
        self._outbox = outbox
        self._runs: dict[str, SampleRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ToolThreads(self._tools_hang)
        workflow = user.config.workflow
        self._watchdog = Watchdog(
            report=report,
            step_timeout_s=workflow.step_timeout_s,
            memory_bytes=workflow.worker_memory_mib << 20,
        )
        self._watchdog.start(asyncio.get_running_loop())

    async def handle(self, command: WorkerCommand) -> None:
        """Takes one frame of the dispatcher.

        In pieces: what the first samples ask for is on its way while the next ones are worked on.
        """
        runs = self._runs
        async for answer in _in_pieces(command.answers):
            run = runs.get(answer.vertex_id.partition("/")[0])
            if run is not None:
                run.answer(answer)
        async for sample in _in_pieces(command.start):
            self._start(sample)
        for sample_id in command.cancel_sample_ids:
            run = runs.get(sample_id)
            if run is not None:
                run.cancel()

    def _tools_hang(self, sample_id: str, message: str) -> None:
        self._watchdog.end(sample_id, message, reason=ErrorReason.TOOL_RAISED)

    def _start(self, sample: WorkerSample) -> None:
        sample_id = sample.spec.sample_id
        if sample_id in self._runs:
            return
        run = self._runs[sample_id] = SampleRun(
            sample,
            user=self._user,
            outbox=self._outbox,
            threads=self._threads,
        )
        task = asyncio.get_running_loop().create_task(self._run(sample_id, run), name=sample_id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, sample_id: str, run: SampleRun) -> None:
        try:
            end = await run.execute()
        finally:
            del self._runs[sample_id]
        self._outbox.event().ends.append(end)


async def _in_pieces(items: Iterable[ItemT]) -> AsyncIterator[ItemT]:
    """Lets whatever waits for the loop run after each piece."""
    for index, item in enumerate(items, 1):
        yield item
        if index % _PIECE == 0:
            await asyncio.sleep(0)
