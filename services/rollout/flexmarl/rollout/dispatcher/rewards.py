"""The run's reward processes: fed, timed from outside, ended when a job takes too long.

A reward function may hold its interpreter's lock for ever, so nothing inside its process can be
trusted to end it. Jobs run one at a time in each process, in the order sent; the time of the one in
front counts from the end of the one before.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.rollout.v1.worker_pb2 import (
    RewardCommand,
    RewardEvent,
    RewardJob,
    RewardResult,
    WorkerSetup,
)
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.config import UserCodeConfig
from flexmarl.rollout.dispatcher.outgoing import Outgoing, send_to_child
from flexmarl.rollout.dispatcher.workers import MAX_STILLBORN, START_S, import_failure
from flexmarl.runtime.aio import Background
from flexmarl.runtime.children import ChildProcess, Children
from flexmarl.runtime.config import LogConfig
from flexmarl.runtime.logging import get_logger

REWARD_MODULE: Final = "flexmarl.rollout.worker.reward_process"
MAX_SENT: Final = 128
"""Jobs in one process at once; one runs, the others need no turn of this loop to follow it."""

MAX_DEATHS: Final = 2
"""Processes that may end while a job is in front of them before it is given up."""

RESTART_PAUSE_S: Final = 0.2
_CHECK_S: Final = 0.1

_log = get_logger(__name__)

OnScored = Callable[[RewardResult], None]


@dataclass(slots=True)
class _Job:
    """One sample to score, or one group to ask the run's own estimator about.

    `deaths` counts processes that ended while it was in front.
    """

    job: RewardJob
    on_scored: OnScored
    deaths: int = 0


@dataclass(slots=True)
class _Slot:
    """Place of one process: jobs sent to it, and since when the one in front runs.

    `stillborn` counts the last ones that ended before they had imported the function; `timed_out`
    is the job that a process was ended for.
    """

    ordinal: int
    sent: deque[_Job] = field(default_factory=deque)
    outgoing: Outgoing[RewardCommand] = field(default_factory=lambda: Outgoing(RewardCommand))
    child: ChildProcess | None = None
    ready: bool = False
    since: float = 0.0
    suspect: _Job | None = None
    timed_out: _Job | None = None
    stillborn: int = 0


class RewardPool:
    """Reward processes of one run.

    Each slot waits for its process (freed by its end: another takes its place; one that cannot
    import the function within START_S, or ends before, breaks the pool), for results, and for
    commands to send. Jobs wait for room in a process, in the order given; how many can wait is
    bounded by the samples in progress.

    Args:
        children: Starts processes.
        setup: First command of each process.
        num_processes: Slots.
        timeout_s: Longest run of the function on one sample.
        log: Log section handed to processes.
        limits: What they may take.
        reward: Name of the reward function, for messages.
        estimator: Name of the run's own estimator, for messages; None when it has none.
        counters: Told `rewards` and `reward_failures`.
        on_broken: Told when the function cannot be imported.
    """

    def __init__(
        self,
        children: Children,
        *,
        setup: WorkerSetup,
        num_processes: int,
        timeout_s: float,
        log: LogConfig,
        limits: UserCodeConfig,
        reward: str,
        estimator: str | None,
        counters: Counter[str],
        on_broken: Callable[[Failure], None],
    ) -> None:
        self._children = children
        self._setup = setup
        self._timeout_s = timeout_s
        self._args = {
            "log": log.model_dump(mode="json"),
            "limits": limits.model_dump(mode="json"),
        }
        self._reward = reward
        self._estimator = estimator
        self._counters = counters
        self._on_broken = on_broken
        self._slots = [_Slot(ordinal) for ordinal in range(num_processes)]
        self._waiting: deque[_Job] = deque()
        self._closed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()

    @property
    def num_starting(self) -> int:
        """Processes that cannot score yet."""
        return sum(not slot.ready for slot in self._slots)

    def start(self, background: Background, run_id: str) -> None:
        """Starts all processes."""
        for slot in self._slots:
            name = f"reward {run_id}/{slot.ordinal}"
            self._tasks.append(background.start(name, self._keep(slot, run_id)))
        self._tasks.append(background.start(f"reward times {run_id}", self._watch()))

    def submit(self, job: RewardJob, on_scored: OnScored) -> None:
        """Scores a sample; `on_scored` is told its reward, or why there is none."""
        self._waiting.append(_Job(job, on_scored))
        self._fill()

    def withdraw(self, sample_id: str) -> bool:
        """Takes back a job that no process has yet."""
        for waiting in self._waiting:
            if waiting.job.sample_id == sample_id:
                self._waiting.remove(waiting)
                return True
        return False

    async def close(self) -> None:
        """Ends the processes."""
        self._closed.set()
        for slot in self._slots:
            slot.outgoing.close()
        running = [slot.child for slot in self._slots if slot.child is not None]
        await asyncio.gather(*(child.stop(grace_s=0.5) for child in running))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10.0)

    def _fill(self) -> None:
        while self._waiting:
            free = [slot for slot in self._slots if slot.ready and len(slot.sent) < MAX_SENT]
            slot = min(free, key=lambda slot: (len(slot.sent), slot.ordinal), default=None)
            if slot is None:
                return
            job = self._waiting.popleft()
            if not slot.sent:
                slot.since = self._loop.time()
            slot.sent.append(job)
            slot.outgoing.add().jobs.append(job.job)

    async def _keep(self, slot: _Slot, run_id: str) -> None:
        """Keeps one slot filled until the pool closes."""
        name = f"reward-{run_id}-{slot.ordinal}"
        while not self._closed.is_set():
            try:
                slot.child = await self._children.spawn_preloaded(
                    f"{REWARD_MODULE}:run", self._args, name=name
                )
                if self._closed.is_set():  # the pool was closed while the process started
                    await slot.child.stop(grace_s=0.5)
                    return
                await self._converse(slot, slot.child)
            except DomainError as error:
                _log.warning("reward_process_start_failed", process=name, error=str(error))
            if self._closed.is_set():
                return
            self._bury(slot)
            await asyncio.sleep(min(RESTART_PAUSE_S * (1 + slot.stillborn), 5.0))

    async def _converse(self, slot: _Slot, child: ChildProcess) -> None:
        slot.outgoing = Outgoing(RewardCommand)
        slot.outgoing.add().setup.CopyFrom(self._setup)
        slot.timed_out = None
        sender = asyncio.create_task(
            send_to_child(slot.outgoing, child), name=f"{child.name} sender"
        )
        late = self._loop.call_later(START_S, self._import_hangs, child)
        try:
            async for frame in child.link:
                event = RewardEvent.FromString(frame)
                if event.HasField("ready"):
                    late.cancel()
                    self._is_ready(slot, event)
                for result in event.results:
                    self._scored(slot, result)
        finally:
            late.cancel()
            sender.cancel()
            child.link.close()
            if not self._closed.is_set():
                await child.stop(grace_s=0.5)

    def _is_ready(self, slot: _Slot, event: RewardEvent) -> None:
        slot.stillborn = 0
        if event.ready.HasField("failure"):
            self._on_broken(event.ready.failure)
            return
        slot.ready = True
        self._fill()

    def _scored(self, slot: _Slot, result: RewardResult) -> None:
        job = slot.sent.popleft()
        assert job.job.sample_id == result.sample_id, "results come in the order of the jobs"
        slot.since = self._loop.time()
        self._tell(job, result)
        self._fill()

    def _tell(self, job: _Job, result: RewardResult) -> None:
        if not job.job.scopes:
            self._counters["rewards"] += 1
            self._counters["reward_failures"] += result.HasField("failure")
        job.on_scored(result)

    async def _watch(self) -> None:
        """Ends processes whose job takes too long; looks every _CHECK_S until the pool closes."""
        while not self._closed.is_set():
            await asyncio.sleep(_CHECK_S)
            late = self._loop.time() - self._timeout_s
            for slot in self._slots:
                front = slot.sent[0] if slot.sent and slot.since < late else None
                # Seen twice: its result may be on the link, and this loop may have been busy.
                if front is not None and front is slot.suspect and slot.child is not None:
                    slot.timed_out = front
                    slot.child.kill()
                slot.suspect = front

    def _bury(self, slot: _Slot) -> None:
        """Blames the job in front for the end of its process; the others go to another one."""
        child, slot.child = slot.child, None
        was_ready, slot.ready = slot.ready, False
        sent = list(slot.sent)
        slot.sent.clear()
        code = None if child is None else child.exit_code
        if child is not None and not was_ready:
            self._note_stillborn(slot, code)
        late = slot.timed_out
        _log.warning(
            "reward_process_died", slot=slot.ordinal, exit_code=code, timed_out=late is not None
        )
        self._counters["reward_process_deaths"] += 1
        # A late job's result may have been on the link when its process was ended: then the job
        # that stands in front now has nothing to do with it.
        if sent and (late is None or late is sent[0]):
            front = sent[0]
            front.deaths += 1
            if late is not None or front.deaths >= MAX_DEATHS:
                sent = sent[1:]
                self._tell(front, self._failed(front, code, timed_out=late is not None))
        self._waiting.extendleft(reversed(sent))
        self._fill()

    def _note_stillborn(self, slot: _Slot, code: int | None) -> None:
        slot.stillborn += 1
        if slot.stillborn >= MAX_STILLBORN:
            self._cannot_import(
                f"it ended its process {slot.stillborn} times in a row (exit code {code})"
            )

    def _import_hangs(self, child: ChildProcess) -> None:
        self._cannot_import(f"it has not ended within {START_S:g} s")
        child.kill()

    def _cannot_import(self, problem: str) -> None:
        # Workers import the reward function's module, too; the estimator's is imported here alone.
        what = f"the module of reward {self._reward}"
        if self._estimator is not None:
            what = f"the modules of reward {self._reward} and estimator {self._estimator}"
        self._on_broken(import_failure(what, problem))

    def _failed(self, job: _Job, code: int | None, *, timed_out: bool) -> RewardResult:
        what, reason = f"reward {self._reward}", ErrorReason.REWARD_RAISED
        if job.job.scopes:
            what, reason = f"estimator {self._estimator}", ErrorReason.ADVANTAGE_RAISED
        if timed_out:
            message = f"{what} did not return within reward_timeout_s = {self._timeout_s:g}"
        else:
            message = f"{what} ended its process {job.deaths} times (exit code {code})"
        failure = Failure(reason=reason, message=message, metadata={"what": what})
        return RewardResult(sample_id=job.job.sample_id, failure=failure)
