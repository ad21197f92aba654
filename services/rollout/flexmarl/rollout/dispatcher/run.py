"""One run in the dispatcher: its samples, from admission to their stored end.

    StartSamples -> row OPEN stored -> (version active) -> (stored vertices read) -> worker
    worker: calls -> CallDesk -> instance -> store -> answer ...  end -> rows stored -> forgotten

Each stage waits for one thing: the store's acknowledgement, ActivateVersion, room in a worker, the
worker's end (at latest sample_timeout_s later), the last row that is being written.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.common.v1alpha1.common_pb2 import Failure, VertexRef
from flexmarl.api.meg_store.v1alpha1.graph_pb2 import Manifest, PolicyManifest, Vertex
from flexmarl.api.meg_store.v1alpha1.meg_store_pb2 import (
    VERTEX_VIEW_FULL,
    WRITE_OUTCOME_ACCEPTED,
    WRITE_OUTCOME_DUPLICATE,
)
from flexmarl.api.rollout.v1alpha1.rollout_pb2 import SampleSpec
from flexmarl.api.rollout.v1alpha1.worker_pb2 import (
    CallAnswer,
    SampleEnd,
    WorkerEvent,
    WorkerSample,
)
from flexmarl.client.store import StoreClient
from flexmarl.core.errors import DomainError, ErrorFamily, ErrorReason
from flexmarl.rollout.dispatcher import rows
from flexmarl.rollout.dispatcher.call_desk import CallDesk
from flexmarl.rollout.dispatcher.fleet import Fleet
from flexmarl.rollout.dispatcher.samples import SampleState, Stage
from flexmarl.rollout.dispatcher.workers import WorkerPool, WorkerSlot
from flexmarl.rollout.dispatcher.writer import GraphWriter
from flexmarl.runtime.aio import Background
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.run_config import RunConfig
from flexmarl.runtime.spans import SpanRecorder

TICK_S: Final = 1.0
MAX_READS: Final = 16
BACKSTOP_S: Final = 30.0
"""A sample whose worker has said nothing so long after its own deadlines: the worker is ended."""

SLOW_WRITE_S: Final = 1.0
"""A write that takes longer than this is told among what the run waits for."""

SHORTAGE_S: Final = 10.0
"""How long hosts may be too few for the run's policies: another one may be about to connect."""

_FATAL: Final = frozenset(
    (
        ErrorReason.UNKNOWN_AGENT.value,
        ErrorReason.NOT_BUILT.value,
        ErrorReason.WORKFLOW_IMPORT_FAILED.value,
        ErrorReason.MODEL_INVALID.value,
    )
)
"""Failures of a sample that every other sample would meet, too."""

T = TypeVar("T")

_log = get_logger(__name__)


class Run:
    """An open run.

    Attributes:
        term: Newest orchestrator term seen.
        version: Active version; -1 before the first.
        fatal: Why the run cannot go on; None while it can.
    """

    def __init__(
        self,
        run_id: str,
        *,
        config: RunConfig,
        store: StoreClient,
        background: Background,
        spans: SpanRecorder,
        span_dir: Path,
        max_crashes: int,
    ) -> None:
        self.run_id = run_id
        self.config = config
        self.store = store
        self.term = 0
        self.version = -1
        self.fatal: Failure | None = None
        self._trouble: str | None = None
        self._background = background
        self._spans = spans
        self._span_dir = span_dir
        self._max_crashes = max_crashes
        self._samples: dict[str, SampleState] = {}
        self._ended: dict[str, None] = {}
        self._open: Counter[int] = Counter()
        self._reads = asyncio.Semaphore(MAX_READS)
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []

    def wire(
        self, *, desk: CallDesk, fleet: Fleet, writer: GraphWriter, workers: WorkerPool
    ) -> None:
        """Takes the parts that were built around this run, and starts them."""
        self.desk = desk
        self.fleet = fleet
        self.writer = writer
        self.workers = workers
        fleet.start(desk)
        workers.start(self._background, self.run_id)
        for name, coroutine in (("writer", writer.run()), ("supervisor", self._supervise())):
            self._tasks.append(self._background.start(f"{self.run_id} {name}", coroutine))

    async def close(self) -> None:
        """Ends workers and instances; nothing further is written."""
        self.fleet.close()
        self.desk.close()
        for task in self._tasks:
            task.cancel()
        await self.workers.close()
        await self._flush_spans()
        await self.store.close()

    @property
    def num_open(self) -> int:
        """Samples admitted and not ended."""
        return len(self._samples)

    def open_versions(self) -> Counter[int]:
        """Number of open samples by version."""
        return self._open

    def waits(self) -> list[str]:
        """What the run waits for, one line each."""
        lines: list[str] = []
        missing = self.workers.num_slots - self.workers.num_ready
        if missing:
            lines.append(f"workflow workers: {missing} of {self.workers.num_slots} start")
        if self.version < 0:
            lines.append("orchestrator: no version is active yet")
        shortage = self.fleet.shortage()
        if shortage is not None:
            lines.append(f"engine hosts: {shortage.message}")
        serving = self.fleet.is_serving(self.version)
        lines += [
            f"policy {policy}: no instance serves version {max(self.version, 0)}"
            for policy in sorted(serving)
            if not serving[policy]
        ]
        if self._trouble is not None:
            lines.append(self._trouble)
        elif (waiting_s := self.writer.waiting_s(self._loop.time())) >= SLOW_WRITE_S:
            lines.append(f"MEG Store: has not taken rows for {waiting_s:.1f} s")
        return lines

    def trouble(self, error: DomainError | None) -> None:
        """The writer cannot store rows; None: it can again."""
        if error is None:
            self._trouble = None
            return
        self._trouble = f"MEG Store: {error.message}"
        self._set_fatal(Failure(reason=error.reason, message=f"MEG Store: {error.message}"))

    # The orchestrator's side.

    def start_samples(self, specs: Iterable[SampleSpec]) -> None:
        """Admits samples; known ones are left alone."""
        for spec in specs:
            if spec.sample_id in self._samples or spec.sample_id in self._ended:
                continue
            sample = self._samples[spec.sample_id] = SampleState(spec)
            self._open[spec.version] += 1
            self.writer.sample(rows.open_sample(spec), [], partial(self._opened, sample))

    def cancel_samples(self, sample_ids: Iterable[str]) -> None:
        """Cuts samples; unknown ones are ignored."""
        for sample_id in sample_ids:
            sample = self._samples.get(sample_id)
            if sample is None or sample.end is not None:
                continue
            sample.cancelled = True
            if sample.slot is not None:
                sample.slot.outgoing.add().cancel_sample_ids.append(sample_id)
            elif sample.stage is Stage.WAITING or self.workers.withdraw(sample_id):
                self._end_here(sample, common_pb2.SAMPLE_STATUS_CANCELLED)

    def announce(self, version: int, policies: dict[str, PolicyManifest]) -> None:
        """Weights of a version may be fetched and loaded from now on."""
        keep = min((v for v, count in self._open.items() if count > 0), default=version)
        for name in sorted(policies):
            forget_below = max(min(keep, self.version, version - 1), 0)
            self.fleet.announce(name, version, policies[name], forget_below=forget_below)
        self.fleet.order_loads()

    def activate(self, manifest: Manifest) -> None:
        """A version is committed: samples of it may run."""
        self.announce(manifest.version, dict(manifest.policies))
        if manifest.version <= self.version:
            return
        self.version = manifest.version
        self._ended = {i: None for i in self._ended if self._is_recent(i)}
        for sample in list(self._samples.values()):
            if sample.stage is Stage.WAITING:
                self._go(sample)

    def _is_recent(self, sample_id: str) -> bool:
        # Ids start with the batch, and a batch is sampled at the version of its number.
        return int(sample_id[1:].partition("a")[0]) >= self.version - 1

    # From admission to the worker.

    def _opened(self, sample: SampleState, outcome: int) -> None:
        if outcome == WRITE_OUTCOME_DUPLICATE:
            self._forget(sample)  # it ended before this dispatcher was started
            return
        sample.resumed = outcome != WRITE_OUTCOME_ACCEPTED
        sample.stage = Stage.WAITING
        self._go(sample)

    def _go(self, sample: SampleState) -> None:
        """Brings a sample into a worker, as far as it can go now."""
        if sample.spec.version > self.version and not sample.cancelled:
            sample.stage = Stage.WAITING
        elif sample.cancelled:
            self._end_here(sample, common_pb2.SAMPLE_STATUS_CANCELLED)
        elif sample.resumed:
            sample.stage = Stage.READING
            name = f"read {sample.spec.sample_id}"
            self._background.start(name, self._read(sample))
        else:
            self._submit(sample, [])

    async def _read(self, sample: SampleState) -> None:
        """Reads what is stored of a sample; waits for a place among the reads and for the store."""
        sample_id = sample.spec.sample_id
        async with self._reads:
            graph = await self._patiently(
                lambda: self.store.get_sample_graph(self.run_id, sample_id, view=VERTEX_VIEW_FULL)
            )
        if self._samples.get(sample.spec.sample_id) is not sample:
            return
        if graph.sample.status not in (
            common_pb2.SAMPLE_STATUS_OPEN,
            common_pb2.SAMPLE_STATUS_UNSPECIFIED,
        ):
            self._forget(sample)
            return
        finished = (common_pb2.VERTEX_STATUS_DONE, common_pb2.VERTEX_STATUS_FAILED)
        stored = [vertex for vertex in graph.vertices if vertex.meta.status in finished]
        for vertex in stored:
            if vertex.meta.status == common_pb2.VERTEX_STATUS_DONE:
                sample.done.add(vertex.meta.vertex_id)
                self._count(sample, vertex)
        self.desk.counters["replayed"] += len(stored)
        self._submit(sample, stored)

    def _submit(self, sample: SampleState, stored: list[Vertex]) -> None:
        if sample.cancelled:
            self._end_here(sample, common_pb2.SAMPLE_STATUS_CANCELLED)
            return
        sample.stage = Stage.RUNNING
        sample.started_unix_ns = sample.started_unix_ns or time.time_ns()
        sample.started_at = self._loop.time()
        self.workers.submit(WorkerSample(spec=sample.spec, stored=stored), crashes=sample.crashes)

    def _count(self, sample: SampleState, vertex: Vertex) -> None:
        if vertex.meta.kind == common_pb2.VERTEX_KIND_AGENT:
            sample.count(vertex.meta.policy_version)
        else:
            sample.num_vertices += 1

    # The workers' side.

    def worker_event(self, slot: WorkerSlot, event: WorkerEvent) -> None:
        """A frame of a worker, its parts in the order in which they depend on each other."""
        for vertex in event.tools:
            self._tool(vertex)
        for call in event.calls:
            sample = self._running(call.sample_id)
            if sample is not None:
                self.desk.call(sample, call)
        for vertex_id in event.cancelled_vertex_ids:
            self.desk.cut(vertex_id, keep_row=True)
        for end in event.ends:
            sample = self._running(end.sample_id)
            self.workers.ended(slot, end.sample_id)
            if sample is not None:
                self._ends(sample, end)

    def worker_took(self, slot: WorkerSlot, sample_id: str) -> None:
        """A sample was given to a worker."""
        self._samples[sample_id].slot = slot

    def worker_ready(self, failure: Failure | None) -> None:
        """A worker has imported the workflow, or cannot."""
        if failure is not None:
            self._set_fatal(failure)

    def worker_died(self, sample_ids: list[str], culprit: Failure | None) -> None:
        """A worker ended: its samples run again, from what is stored; a culprit fails."""
        self.desk.counters["worker_deaths"] += 1
        guilty = "" if culprit is None else culprit.metadata["sample_id"]
        for sample_id in sample_ids:
            sample = self._samples.get(sample_id)
            if sample is None or sample.end is not None:
                continue
            for vertex_id in list(sample.calls):
                self.desk.cut(vertex_id, keep_row=False)
            sample.slot = None
            if culprit is None:
                sample.crashes += 1
            if sample_id == guilty:
                self._end_here(sample, common_pb2.SAMPLE_STATUS_FAILED, culprit)
            elif sample.crashes > self._max_crashes:
                self._end_here(sample, common_pb2.SAMPLE_STATUS_FAILED, self._poisonous(sample))
            else:
                self._restart(sample)

    def _poisonous(self, sample: SampleState) -> Failure:
        message = (
            f"sample {sample.spec.sample_id}: its worker died {sample.crashes} times "
            f"(worker_restarts = {self._max_crashes}); see the worker's log"
        )
        return Failure(reason=ErrorReason.CHILD_DIED, message=message)

    def _restart(self, sample: SampleState) -> None:
        sample.forget_progress()
        sample.resumed = True
        sample.stage = Stage.READING
        if sample.writing == 0:
            self._go(sample)
        # Else `row_stored` goes on: what is being written must be found by the read.

    def _running(self, sample_id: str) -> SampleState | None:
        sample = self._samples.get(sample_id)
        return sample if sample is not None and sample.stage is Stage.RUNNING else None

    def _tool(self, vertex: Vertex) -> None:
        sample = self._running(vertex.meta.sample_id)
        if sample is None:
            return
        if vertex.meta.status == common_pb2.VERTEX_STATUS_DONE:
            sample.done.add(vertex.meta.vertex_id)
            sample.num_vertices += 1
        self.desk.counters["tools"] += 1
        sample.writing += 1

        def stored(_: int) -> None:
            sample.writing -= 1
            self.row_stored(sample)

        self.writer.vertex(vertex, stored)

    # The calls' side.

    def call_answered(self, sample: SampleState, answer: CallAnswer) -> None:
        """A call has its stored answer."""
        if sample.slot is not None and sample.stage is Stage.RUNNING:
            sample.slot.outgoing.add().answers.append(answer)

    def row_found(self, sample: SampleState, vertex_id: str, agent: str) -> None:
        """A call's row was stored before with other content: that is what it is answered with."""
        if sample.slot is not None and sample.end is None:
            self._background.start(
                f"read {vertex_id}", self._answer_stored(sample, vertex_id, agent)
            )

    async def _answer_stored(self, sample: SampleState, vertex_id: str, agent: str) -> None:
        ref = VertexRef(vertex_id=vertex_id, agent=agent)
        (vertex,) = await self._patiently(
            lambda: self.store.get_vertices(self.run_id, [ref], view=VERTEX_VIEW_FULL)
        )
        answer = CallAnswer(
            vertex_id=vertex_id,
            tokens=vertex.payload.response_tokens,
            finish_reason=vertex.meta.finish_reason,
            failure=vertex.meta.failure if vertex.meta.HasField("failure") else None,
        )
        self.call_answered(sample, answer)

    def row_stored(self, sample: SampleState) -> None:
        """One row less is being written: whoever waited for the last one goes on."""
        if sample.writing:
            return
        if sample.end is not None and sample.stage is Stage.RUNNING:
            self._write_end(sample)
        elif sample.stage is Stage.READING and sample.slot is None and sample.resumed:
            self._go(sample)

    async def _patiently(self, read: Callable[[], Awaitable[T]]) -> T:
        """Reads from the store; repeats while it is away, and says so, until the run is closed."""
        while True:
            try:
                return await read()
            except DomainError as error:
                self.trouble(error)
                if error.reason.family is not ErrorFamily.UNAVAILABLE:
                    raise
                await asyncio.sleep(TICK_S)

    # The end.

    def _end_here(
        self,
        sample: SampleState,
        status: common_pb2.SampleStatus.ValueType,
        failure: Failure | None = None,
    ) -> None:
        """Ends a sample that no worker will end."""
        sample.stage = Stage.RUNNING
        end = SampleEnd(sample_id=sample.spec.sample_id, status=status, failure=failure)
        self._ends(sample, end)

    def _ends(self, sample: SampleState, end: SampleEnd) -> None:
        sample.end = end
        if end.failure.reason in _FATAL:
            self._set_fatal(end.failure)
        for vertex_id in list(sample.calls):
            self.desk.cut(vertex_id, keep_row=True)
        if sample.writing == 0:
            self._write_end(sample)

    def _write_end(self, sample: SampleState) -> None:
        end = sample.end
        assert end is not None
        sample.stage = Stage.ENDING
        sample.slot = None
        now_ns = time.time_ns()
        row = rows.ended_sample(
            sample.spec,
            end,
            num_vertices=sample.num_vertices,
            versions=(max(sample.min_version, 0), max(sample.max_version, 0)),
            started_unix_ns=sample.started_unix_ns or now_ns,
            finished_unix_ns=now_ns,
        )
        name = common_pb2.SampleStatus.Name(end.status).removeprefix("SAMPLE_STATUS_").lower()
        self.desk.counters[f"samples_{name}"] += 1
        if end.HasField("failure"):
            _log.warning(
                "sample_failed",
                sample=sample.spec.sample_id,
                reason=end.failure.reason,
                message=end.failure.message,
            )
        self.writer.sample(row, sample.cut, lambda _: self._forget(sample))

    def _forget(self, sample: SampleState) -> None:
        version = sample.spec.version
        self._samples.pop(sample.spec.sample_id, None)
        self._ended[sample.spec.sample_id] = None
        self._open[version] -= 1
        if self._open[version] <= 0:
            del self._open[version]
            self.fleet.order_loads()

    def _set_fatal(self, failure: Failure) -> None:
        if self.fatal is None:
            _log.error("run_cannot_go_on", reason=failure.reason, message=failure.message)
            self.fatal = failure

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
            self._set_fatal(Failure(reason=shortage.reason, message=shortage.message))
        return now if since is None else since

    def _end_silent_workers(self) -> None:
        workflow = self.config.workflow
        patience_s = workflow.sample_timeout_s + workflow.reward_timeout_s + BACKSTOP_S
        late = self._loop.time() - patience_s
        for sample in self._samples.values():
            slot = sample.slot
            if slot is not None and sample.end is None and sample.started_at < late:
                _log.error("worker_silent", slot=slot.ordinal, sample=sample.spec.sample_id)
                self.workers.kill(slot)
                return

    async def _flush_spans(self) -> None:
        await asyncio.to_thread(self._spans.flush, self._span_dir)
