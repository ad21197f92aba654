"""The run's workflow workers: started, fed, watched, started again."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.rollout.v1.worker_pb2 import (
    WorkerCommand,
    WorkerEvent,
    WorkerSample,
    WorkerSetup,
)
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.config import UserCodeConfig
from flexmarl.rollout.dispatcher.outgoing import Outgoing, send_to_child
from flexmarl.rollout.worker.watchdog import held_at, stack_file
from flexmarl.runtime.aio import Background
from flexmarl.runtime.children import ChildProcess, Children
from flexmarl.runtime.config import LogConfig
from flexmarl.runtime.logging import get_logger

WORKER_MODULE: Final = "flexmarl.rollout.worker.main"
RESTART_PAUSE_S: Final = 0.5
MAX_STILLBORN: Final = 3
"""Workers in a row that end before they have imported the workflow: the next one would, too."""

START_S: Final = 120.0
"""Longest that a worker may take to import the workflow: user code, which may never end."""

_MAX_STACK_CHARS: Final = 1 << 16
_SUSPECT: Final = 2
"""Crashes after which a sample runs alone in its worker, so that the guilty one is found."""

_log = get_logger(__name__)


class WorkerListener(Protocol):
    """The run that the workers work for."""

    def worker_event(self, slot: WorkerSlot, event: WorkerEvent) -> None:
        """A frame came."""
        ...

    def worker_took(self, slot: WorkerSlot, sample_id: str) -> None:
        """A sample was given to a worker."""
        ...

    def worker_ready(self, failure: Failure | None) -> None:
        """A worker has imported the workflow, or cannot."""
        ...

    def worker_died(self, sample_ids: list[str], word: Failure | None) -> None:
        """A worker ended; these samples were in it.

        What it left is a failure; where a sample is to blame, its metadata name it.
        """
        ...


@dataclass(slots=True)
class WorkerSlot:
    """Place of one worker process.

    Attributes:
        ordinal: Number of the place.
        samples: Samples in it.
        outgoing: What waits to be sent to it.
        ready: Whether it has imported the workflow.
        deaths: Processes that ended here.
        stillborn: How many of the last ones ended before they had imported the workflow.
        alone: Whether the sample in it must stay alone.
    """

    ordinal: int
    samples: dict[str, None] = field(default_factory=dict)
    outgoing: Outgoing[WorkerCommand] = field(default_factory=lambda: Outgoing(WorkerCommand))
    ready: bool = False
    deaths: int = 0
    stillborn: int = 0
    alone: bool = False
    child: ChildProcess | None = None


class WorkerPool:
    """Workers of one run.

    Each slot waits for its process (freed by its end: another takes its place), its reader for
    frames, its sender for commands. Samples wait for room, oldest group first in the order given.

    Args:
        children: Starts processes.
        setup: First command of each worker.
        num_workers: Slots.
        max_samples: Most samples in one worker.
        step_timeout_s: Longest time that user code may hold one.
        report_dir: Where watchdogs leave word.
        log: Log section handed to workers.
        limits: What they may take.
    """

    def __init__(
        self,
        children: Children,
        *,
        setup: WorkerSetup,
        num_workers: int,
        max_samples: int,
        step_timeout_s: float,
        report_dir: Path,
        log: LogConfig,
        limits: UserCodeConfig,
        listener: WorkerListener,
    ) -> None:
        self._children = children
        self._setup = setup
        self._max_samples = max_samples
        self._step_timeout_s = step_timeout_s
        self._report_dir = report_dir
        self._log = log
        self._limits = limits
        self._listener = listener
        self._slots = [WorkerSlot(ordinal) for ordinal in range(num_workers)]
        self._waiting: deque[tuple[WorkerSample, bool]] = deque()
        self._closed = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def num_ready(self) -> int:
        """Workers that run samples."""
        return sum(slot.ready for slot in self._slots)

    @property
    def num_slots(self) -> int:
        """Workers wanted."""
        return len(self._slots)

    def start(self, background: Background, run_id: str) -> None:
        """Starts all workers."""
        for slot in self._slots:
            name = f"worker {run_id}/{slot.ordinal}"
            self._keepers.append(background.start(name, self._keep(slot, run_id)))

    def submit(self, sample: WorkerSample, *, crashes: int) -> None:
        """Runs a sample in the worker with the fewest, when there is room."""
        self._waiting.append((sample, crashes >= _SUSPECT))
        self._fill()

    def withdraw(self, sample_id: str) -> bool:
        """Takes back a sample that has not been given to a worker."""
        for entry in self._waiting:
            if entry[0].spec.sample_id == sample_id:
                self._waiting.remove(entry)
                return True
        return False

    def ended(self, slot: WorkerSlot, sample_id: str) -> None:
        """A sample left its worker."""
        slot.samples.pop(sample_id, None)
        if not slot.samples:
            slot.alone = False
        if self._waiting:
            self._fill()

    def kill(self, slot: WorkerSlot) -> None:
        """Ends the worker of a slot that does not answer; another takes its place."""
        if slot.child is not None:
            slot.child.kill()

    async def close(self) -> None:
        """Ends the workers."""
        self._closed.set()
        for slot in self._slots:
            slot.outgoing.close()
        running = [slot.child for slot in self._slots if slot.child is not None]
        await asyncio.gather(*(child.stop(grace_s=1.0) for child in running))
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=10.0)

    def _fill(self) -> None:
        waiting = self._waiting
        while waiting:
            sample, alone = waiting[0]
            slot = self._least_loaded(alone=alone)
            if slot is None:
                return
            waiting.popleft()
            slot.alone = alone
            slot.samples[sample.spec.sample_id] = None
            slot.outgoing.add().start.append(sample)
            self._listener.worker_took(slot, sample.spec.sample_id)

    def _least_loaded(self, *, alone: bool) -> WorkerSlot | None:
        limit = 1 if alone else self._max_samples
        free = [
            slot
            for slot in self._slots
            if slot.ready and not slot.alone and len(slot.samples) < limit
        ]
        return min(free, key=lambda slot: (len(slot.samples), slot.ordinal), default=None)

    async def _keep(self, slot: WorkerSlot, run_id: str) -> None:
        """Keeps one slot filled until the pool closes."""
        while not self._closed.is_set():
            name = f"worker-{run_id}-{slot.ordinal}"
            report = self._report_dir / f"{name}.json"
            report.unlink(missing_ok=True)
            stack_file(report).unlink(missing_ok=True)
            try:
                slot.child = await self._children.spawn_preloaded(
                    f"{WORKER_MODULE}:run",
                    {
                        "report": str(report),
                        "log": self._log.model_dump(mode="json"),
                        "limits": self._limits.model_dump(mode="json"),
                    },
                    name=name,
                )
                if self._closed.is_set():  # the pool was closed while the process started
                    await slot.child.stop(grace_s=0.5)
                    return
                await self._converse(slot, slot.child)
            except DomainError as error:
                _log.warning("worker_start_failed", worker=name, error=str(error))
            if self._closed.is_set():
                return
            self._bury(slot, report)
            if slot.deaths > 1:
                await asyncio.sleep(min(RESTART_PAUSE_S * slot.deaths, 5.0))

    async def _converse(self, slot: WorkerSlot, child: ChildProcess) -> None:
        slot.outgoing = Outgoing(WorkerCommand)
        slot.outgoing.add().setup.CopyFrom(self._setup)
        sender = asyncio.create_task(
            send_to_child(slot.outgoing, child), name=f"{child.name} sender"
        )
        late = asyncio.get_running_loop().call_later(START_S, self._import_hangs, child)
        try:
            async for frame in child.link:
                event = WorkerEvent.FromString(frame)
                if event.HasField("ready"):
                    late.cancel()
                    self._ready(slot, event)
                self._listener.worker_event(slot, event)
        finally:
            late.cancel()
            sender.cancel()
            child.link.close()
            if not self._closed.is_set():
                await child.stop(grace_s=0.5)

    def _ready(self, slot: WorkerSlot, event: WorkerEvent) -> None:
        failed = event.ready.HasField("failure")
        self._listener.worker_ready(event.ready.failure if failed else None)
        slot.stillborn = 0
        if not failed:
            slot.ready = True
            self._fill()

    def _bury(self, slot: WorkerSlot, report: Path) -> None:
        child, slot.child = slot.child, None
        samples = list(slot.samples)
        slot.samples.clear()
        exit_code = None if child is None else child.exit_code
        if child is not None and not slot.ready:
            self._note_stillborn(slot, exit_code)
        slot.ready = slot.alone = False
        slot.deaths += 1
        word = _read_report(report) or self._read_stack(report, samples)
        _log.warning(
            "worker_died",
            slot=slot.ordinal,
            exit_code=exit_code,
            samples=len(samples),
            word="" if word is None else word.message,
        )
        self._listener.worker_died(samples, word)

    def _note_stillborn(self, slot: WorkerSlot, exit_code: int | None) -> None:
        slot.stillborn += 1
        if slot.stillborn >= MAX_STILLBORN:
            self._cannot_import(
                f"it ended its worker {slot.stillborn} times in a row (exit code {exit_code})"
            )

    def _import_hangs(self, child: ChildProcess) -> None:
        self._cannot_import(f"it has not ended within {START_S:g} s")
        child.kill()

    def _cannot_import(self, problem: str) -> None:
        self._listener.worker_ready(import_failure("the workflow's modules", problem))

    def _read_stack(self, report: Path, samples: list[str]) -> Failure | None:
        """What a worker left whose interpreter was held: its only sample is to blame, if any.

        Where no thread was in the user's code, the whole process stood still, as in a container
        that is paused: that was nobody's fault.
        """
        try:
            with stack_file(report).open(encoding="utf-8", errors="replace") as file:
                stack = file.read(_MAX_STACK_CHARS)
        except OSError:
            return None
        if not stack:
            return None
        place = held_at(stack, self._setup.workflow_path)
        what = "user code held its worker's interpreter" if place else "its worker stood still"
        message = f"{what} for longer than step_timeout_s = {self._step_timeout_s:g}" + (
            f" ({place})" if place else ""
        )
        guilty = samples[0] if place and len(samples) == 1 else ""
        return Failure(
            reason=ErrorReason.WORKFLOW_RAISED, message=message, metadata={"sample_id": guilty}
        )


def import_failure(what: str, problem: str) -> Failure:
    """Why no process can be had that has imported what it needs."""
    message = f"importing {what}: {problem}"
    return Failure(reason=ErrorReason.WORKFLOW_IMPORT_FAILED, message=message)


def _read_report(path: Path) -> Failure | None:
    """What a watchdog left: a failure with the sample in its metadata."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Failure(
        reason=data["reason"], message=data["message"], metadata={"sample_id": data["sample_id"]}
    )
