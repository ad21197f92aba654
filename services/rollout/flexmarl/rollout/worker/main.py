"""A workflow worker: a child process of the dispatcher that runs user code.

It waits for frames of its link (freed by a frame; the closing of the link ends the process, I15)
and runs many samples at once on one event loop, with a task factory that gives calls stable ids.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import uvloop

from flexmarl.api.common.v1.common_pb2 import SAMPLE_STATUS_FAILED
from flexmarl.api.rollout.v1.worker_pb2 import (
    SampleEnd,
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
from flexmarl.runtime.logging import configure_logging, get_logger
from flexmarl.runtime.main import GC_THRESHOLDS

ItemT = TypeVar("ItemT")

_log = get_logger(__name__)

EXIT_UNHEARD: Final = 89
"""Exit code of a worker whose dispatcher does not take what it says."""

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
    # Long prompts have a thread here; one per core of the library's own would be of no use.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    _run_whatever(loop, loop.create_task(_serve(Path(args["report"]))))
    return 0


def _run_whatever(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    """Runs to the end of the link, whatever user code does to the loop that it shares.

    A loop lets SystemExit and KeyboardInterrupt out of every task and stops, as it does when it is
    told to stop: a `sys.exit()` in one workflow or tool would end all samples beside it. The task
    that raised has its exception, so the loop just goes on.
    """
    while not task.done():
        try:
            loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt, RuntimeError):
            if task.done() or loop.is_closed():
                raise


async def _serve(report: Path) -> None:
    loop = asyncio.get_running_loop()
    link = await AsyncChildLink.from_environment()
    outbox = Outbox(link.send)
    pump = asyncio.create_task(outbox.pump(), name="outbox")
    pump.add_done_callback(_unheard)
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


def _unheard(pump: asyncio.Task[None]) -> None:
    """A worker that cannot be heard is of no use: another one repeats what it has done."""
    if not pump.cancelled():
        _log.error("worker_unheard", error=str(pump.exception()))
        os._exit(EXIT_UNHEARD)


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
        except BaseException as error:  # noqa: BLE001 - no sample may be left without an end
            _log.exception("sample_broke", sample=sample_id)
            end = SampleEnd(sample_id=sample_id, status=SAMPLE_STATUS_FAILED)
            what = f"sample {sample_id}"
            folder = self._user.folder
            end.failure.CopyFrom(
                failures.of_exception(error, reason=ErrorReason.INTERNAL, what=what, folder=folder)
            )
        finally:
            del self._runs[sample_id]
        self._outbox.event().ends.append(end)


async def _in_pieces(items: Iterable[ItemT]) -> AsyncIterator[ItemT]:
    """Lets whatever waits for the loop run after each piece."""
    for index, item in enumerate(items, 1):
        yield item
        if index % _PIECE == 0:
            await asyncio.sleep(0)
