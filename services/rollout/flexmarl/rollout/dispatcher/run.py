"""One open run in the dispatcher: its parts, its version, what it waits for, and their supervision.

What its samples go through is `sample_flow`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.meg_store.v1.graph_pb2 import Manifest, PolicyManifest
from flexmarl.api.rollout.v1.rollout_pb2 import RewardScope, SampleSpec
from flexmarl.api.rollout.v1.worker_pb2 import RewardJob, RewardResult
from flexmarl.client.run_store import RunStore
from flexmarl.core.admission import Admission
from flexmarl.core.errors import DomainError, ErrorReason, find_reason
from flexmarl.rollout.dispatcher.call_desk import CallDesk
from flexmarl.rollout.dispatcher.fleet import Fleet
from flexmarl.rollout.dispatcher.mover import Mover
from flexmarl.rollout.dispatcher.rewards import RewardPool
from flexmarl.rollout.dispatcher.sample_flow import SampleFlow
from flexmarl.rollout.dispatcher.stored import StoredRows
from flexmarl.rollout.dispatcher.workers import WorkerPool
from flexmarl.rollout.dispatcher.writer import GraphWriter
from flexmarl.runtime.aio import Background
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.run_config import RunConfig
from flexmarl.runtime.spans import SpanRecorder

TICK_S: Final = 1.0
BACKSTOP_S: Final = 30.0
"""A sample whose worker has said nothing so long after its own deadlines: the worker is ended."""

SLOW_WRITE_S: Final = 1.0
"""A write that takes longer than this is told among what the run waits for."""

SHORTAGE_S: Final = 10.0
"""How long hosts may be too few for the run's policies: another one may be about to connect."""

_log = get_logger(__name__)


class Run:
    """An open run.

    Attributes:
        term: Newest orchestrator term seen.
        fatal: Why the run cannot go on; None while it can.
        flow: Its samples.
    """

    def __init__(
        self,
        run_id: str,
        *,
        config: RunConfig,
        store: RunStore,
        background: Background,
        spans: SpanRecorder,
        span_dir: Path,
        settled: Callable[[], Awaitable[None]],
        max_crashes: int,
    ) -> None:
        self.run_id = run_id
        self.config = config
        self.store = store
        self.term = 0
        self.fatal: Failure | None = None
        self.flow = SampleFlow(
            stored=StoredRows(store, run_id=run_id, on_trouble=self.trouble),
            background=background,
            listener=self,
            admission=Admission(
                max_queries=config.rollout.max_concurrent_queries,
                max_samples_per_query=config.rollout.max_concurrent_samples_per_query,
            ),
            settled=settled,
            max_crashes=max_crashes,
        )
        self._trouble: str | None = None
        self._background = background
        self._spans = spans
        self._span_dir = span_dir
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []

    def wire(
        self,
        *,
        desk: CallDesk,
        fleet: Fleet,
        mover: Mover,
        writer: GraphWriter,
        workers: WorkerPool,
        rewards: RewardPool,
    ) -> None:
        """Takes the parts that were built around this run, and starts them."""
        self.desk = desk
        self.fleet = fleet
        self.mover = mover
        self.writer = writer
        self.workers = workers
        self.rewards = rewards
        self.flow.wire(desk=desk, writer=writer, workers=workers, rewards=rewards)
        fleet.start(desk)
        workers.start(self._background, self.run_id)
        rewards.start(self._background, self.run_id)
        for name, coroutine in (
            ("writer", writer.run()),
            ("mover", mover.run()),
            ("supervisor", self._supervise()),
        ):
            self._tasks.append(self._background.start(f"{self.run_id} {name}", coroutine))

    async def close(self) -> None:
        """Ends workers and instances; nothing further is written."""
        self.fleet.close()
        self.desk.close()
        self.flow.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self.workers.close(), self.rewards.close())
        await self._flush_spans()
        await self.store.close()

    @property
    def version(self) -> int:
        """Active version; -1 before the first."""
        return self.flow.version

    def waits(self) -> list[str]:
        """What the run waits for, one line each."""
        lines: list[str] = []
        missing = self.workers.num_slots - self.workers.num_ready
        if missing:
            lines.append(f"workflow workers: {missing} of {self.workers.num_slots} start")
        if self.rewards.num_starting:
            lines.append(f"reward processes: {self.rewards.num_starting} start")
        if self.version < 0:
            lines.append("orchestrator: no version is active yet")
        shortage = self.fleet.shortage()
        if shortage is not None:
            lines.append(f"engine hosts: {shortage.message}")
        serving = self.fleet.is_serving(self.version)
        lines += [
            f"policy {policy}: no instance serves version {max(self.version, 0)}"
            + self.fleet.trouble(policy)
            for policy in sorted(serving)
            if not serving[policy]
        ]
        if self._trouble is not None:
            lines.append(self._trouble)
        elif (waiting_s := self.writer.waiting_s(self._loop.time())) >= SLOW_WRITE_S:
            lines.append(f"MEG Store: has not taken rows for {waiting_s:.1f} s")
        return lines

    def trouble(self, error: DomainError | None) -> None:
        """Rows cannot be stored or read; None: they can again."""
        if error is None:
            self._trouble = None
            return
        self._trouble = f"MEG Store: {error.message}"
        self.run_failed(Failure(reason=error.reason, message=self._trouble))

    def run_failed(self, failure: Failure) -> None:
        """The run cannot go on; the first reason is kept."""
        if self.fatal is None:
            _log.error("run_cannot_go_on", reason=failure.reason, message=failure.message)
            self.fatal = failure

    def version_done(self) -> None:
        """The last open sample of a version has ended: instances move, or load the next one."""
        if not self.flow.open_versions():
            self.mover.between_batches()
        self.fleet.order_loads()

    # The orchestrator's side.

    def start_samples(self, specs: Iterable[SampleSpec]) -> None:
        """Admits samples; known ones are left alone."""
        self.flow.start(specs)

    async def cancel_samples(self, sample_ids: Iterable[str]) -> None:
        """Cuts samples, and returns when that is stored; unknown ones are ignored."""
        await self.flow.cancel(sample_ids)

    async def advantages(
        self, group_id: str, scopes: Sequence[RewardScope]
    ) -> Sequence[RewardScope]:
        """What the run's own estimator makes of a group's rewards.

        Waits for a reward process, which the pool ends when it takes too long; freed by its answer,
        or by the caller's deadline.

        Raises:
            DomainError: ADVANTAGE_RAISED.
        """
        answer: asyncio.Future[RewardResult] = self._loop.create_future()

        def answered(result: RewardResult) -> None:
            if not answer.done():  # the caller may have given up
                answer.set_result(result)

        self.rewards.submit(RewardJob(sample_id=group_id, scopes=scopes), answered)
        result = await answer
        if result.HasField("failure"):
            failure = result.failure
            reason = find_reason(failure.reason) or ErrorReason.INTERNAL
            raise DomainError(reason, failure.message, dict(failure.metadata))
        return result.advantages

    def announce(self, version: int, policies: dict[str, PolicyManifest]) -> None:
        """Weights of a version may be fetched and loaded from now on."""
        open_versions = self.flow.open_versions()
        keep = min((v for v, count in open_versions.items() if count > 0), default=version)
        for name in sorted(policies):
            forget_below = max(min(keep, self.version, version - 1), 0)
            self.fleet.announce(name, version, policies[name], forget_below=forget_below)
        self.fleet.order_loads()

    def activate(self, manifest: Manifest) -> None:
        """A version is committed: samples of it may run."""
        self.announce(manifest.version, dict(manifest.policies))
        if manifest.version > self.version:
            self.flow.activate(manifest.version)

    # Supervision.

    async def _supervise(self) -> None:
        """Looks at what no event would bring up; wakes every TICK_S until cancelled."""
        short_since: float | None = None
        while True:
            await asyncio.sleep(TICK_S)
            self.fleet.order_loads()
            self._end_silent_workers()
            short_since = self._check_shortage(short_since)
            await self._flush_spans()

    def _check_shortage(self, since: float | None) -> float | None:
        """Ends the run when hosts are there and stay too few; returns since when they are."""
        shortage = self.fleet.shortage()
        if shortage is None:
            return None
        now = self._loop.time()
        if since is not None and now - since > SHORTAGE_S:
            self.run_failed(Failure(reason=shortage.reason, message=shortage.message))
        return now if since is None else since

    def _end_silent_workers(self) -> None:
        workflow = self.config.workflow
        patience_s = workflow.sample_timeout_s + workflow.reward_timeout_s + BACKSTOP_S
        late = self._loop.time() - patience_s
        for sample in self.flow:
            slot = sample.slot
            if slot is not None and sample.end is None and sample.started_at < late:
                _log.error("worker_silent", slot=slot.ordinal, sample=sample.spec.sample_id)
                self.workers.kill(slot)
                return

    async def _flush_spans(self) -> None:
        await asyncio.to_thread(self._spans.flush, self._span_dir)
