"""The samples of a run, from admission to their stored end.

    start -> row OPEN stored -> (version active) -> admitted -> (stored vertices read) -> worker
    worker: calls -> CallDesk -> instance -> store -> answer ...  end -> reward process
    reward -> rows stored -> forgotten

Each stage waits for one thing: the store's acknowledgement, ActivateVersion, a place among the
samples in progress, room in a worker, the worker's end (at latest sample_timeout_s later), the
reward (at latest reward_timeout_s after those before it), the last row that is being written.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Final, Protocol

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.meg_store.v1.graph_pb2 import Vertex
from flexmarl.api.meg_store.v1.meg_store_pb2 import (
    WRITE_OUTCOME_ACCEPTED,
    WRITE_OUTCOME_DUPLICATE,
    GetSampleGraphResponse,
)
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.api.rollout.v1.worker_pb2 import (
    CallAnswer,
    RewardJob,
    RewardResult,
    SampleEnd,
    WorkerEvent,
    WorkerSample,
)
from flexmarl.core.admission import Admission
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.dispatcher import rows
from flexmarl.rollout.dispatcher.call_desk import CallDesk
from flexmarl.rollout.dispatcher.rewards import RewardPool
from flexmarl.rollout.dispatcher.samples import SampleState, Stage, spec_of
from flexmarl.rollout.dispatcher.stored import StoredRows
from flexmarl.rollout.dispatcher.workers import WorkerPool, WorkerSlot
from flexmarl.rollout.dispatcher.writer import MAX_BYTES, GraphWriter
from flexmarl.runtime.aio import Background
from flexmarl.runtime.logging import get_logger

_FATAL: Final = frozenset(
    (
        ErrorReason.UNKNOWN_AGENT.value,
        ErrorReason.NOT_BUILT.value,
        ErrorReason.WORKFLOW_IMPORT_FAILED.value,
        ErrorReason.MODEL_INVALID.value,
    )
)
"""Failures of a sample that every other sample would meet, too."""

CUT_S: Final = 5.0
"""Longest that whoever cuts samples waits for it to be stored."""

_log = get_logger(__name__)


class FlowListener(Protocol):
    """Who the samples are run for."""

    def run_failed(self, failure: Failure) -> None:
        """The run cannot go on."""
        ...

    def version_done(self) -> None:
        """The last open sample of a version has ended."""
        ...


class SampleFlow:
    """See the module; listens to workers and to calls.

    Attributes:
        version: Active version; -1 before the first.

    Args:
        stored: Reads what is stored.
        background: Owns tasks.
        listener: Told what concerns the whole run.
        admission: Bounds queries and samples in progress.
        settled: Waits until the hosts of a dispatcher before this one are back.
        max_crashes: How often one sample may crash its worker.
    """

    def __init__(
        self,
        *,
        stored: StoredRows,
        background: Background,
        listener: FlowListener,
        admission: Admission,
        settled: Callable[[], Awaitable[None]],
        max_crashes: int,
    ) -> None:
        self.version = -1
        self._settled = settled
        self._admission = admission
        self._stored = stored
        self._background = background
        self._listener = listener
        self._max_crashes = max_crashes
        self._samples: dict[str, SampleState] = {}
        self._ended: dict[str, None] = {}
        self._cut: dict[str, asyncio.Future[None]] = {}
        self._open: Counter[int] = Counter()
        self._reads: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop = asyncio.get_running_loop()

    def wire(
        self, *, desk: CallDesk, writer: GraphWriter, workers: WorkerPool, rewards: RewardPool
    ) -> None:
        """Takes the parts that call back."""
        self._desk = desk
        self._writer = writer
        self._workers = workers
        self._rewards = rewards

    def __len__(self) -> int:
        """Samples admitted and not ended."""
        return len(self._samples)

    def __iter__(self) -> Iterator[SampleState]:
        return iter(self._samples.values())

    def open_versions(self) -> Counter[int]:
        """Number of open samples by version."""
        return self._open

    def close(self) -> None:
        """Reads no more: the store's connection ends with the run, before its workers do."""
        self._closed = True
        for task in self._reads:
            task.cancel()

    def _start_read(self, name: str, read: Callable[[], Awaitable[None]]) -> None:
        if self._closed:
            return
        task = self._background.start(f"read {name}", self._told(name, read))
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)

    async def _told(self, name: str, read: Callable[[], Awaitable[None]]) -> None:
        """Reads; what cannot be read ends the run by name, and leaves the service as it is."""
        try:
            await read()
        except DomainError as error:
            message = f"what is stored of {name} cannot be read: {error.message}"
            self._listener.run_failed(Failure(reason=error.reason, message=message))

    # The orchestrator's side.

    def start(self, specs: Iterable[SampleSpec]) -> None:
        """Admits samples; known ones are left alone."""
        for spec in specs:
            if spec.sample_id in self._samples or spec.sample_id in self._ended:
                continue
            sample = self._samples[spec.sample_id] = SampleState(spec)
            self._open[spec.version] += 1
            self._writer.sample(rows.open_sample(spec), [], partial(self._opened, sample))

    async def cancel(self, sample_ids: Iterable[str]) -> None:
        """Cuts samples, and returns when that is stored; those that nobody began are ignored.

        Whoever cuts a sample ends its group next, and what comes after that is late. Waits for the
        store, at most CUT_S: a sample that is cut ends here, whatever its worker makes of it.
        """
        cut: list[asyncio.Future[None]] = []
        for sample_id in sample_ids:
            sample = self._samples.get(sample_id) or self._left_open(sample_id)
            if sample is None:
                continue
            cut.append(self._stored_end(sample_id))
            if sample.end is not None:
                continue
            sample.cancelled = True
            if sample.slot is not None:
                sample.slot.outgoing.add().cancel_sample_ids.append(sample_id)
            if sample.stage in (Stage.WAITING, Stage.RUNNING):
                if not self._workers.withdraw(sample_id):
                    self._rewards.withdraw(sample_id)
                self._end_here(sample, common_pb2.SAMPLE_STATUS_CANCELLED)
        if cut:
            await asyncio.wait(cut, timeout=CUT_S)

    def _left_open(self, sample_id: str) -> SampleState | None:
        """A sample that is cut and was never started here: one before may have left it open."""
        spec = None if sample_id in self._ended else spec_of(sample_id)
        if spec is None:
            return None
        sample = self._samples[sample_id] = SampleState(spec, stage=Stage.READING)
        self._open[spec.version] += 1
        self._start_read(sample_id, partial(self._end_left_open, sample))
        return sample

    async def _end_left_open(self, sample: SampleState) -> None:
        """Ends a cut sample as the store has it; waits for a place among the reads, and for it."""
        graph = await self._stored.find_graph(sample.spec.sample_id)
        if graph is None or not _is_open(graph):
            self._forget(sample)
            return
        self._count_stored(sample, graph.vertices)
        self._end_here(sample, common_pb2.SAMPLE_STATUS_CANCELLED)

    def _stored_end(self, sample_id: str) -> asyncio.Future[None]:
        """Done when the sample's end is stored."""
        stored = self._cut.get(sample_id)
        if stored is None:
            stored = self._cut[sample_id] = self._loop.create_future()
        return stored

    def activate(self, version: int) -> None:
        """Samples of a version may run."""
        self.version = version
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
        else:
            sample.stage = Stage.WAITING
            spec = sample.spec
            order = (spec.batch, spec.group_ordinal)
            offered = self._admission.offer(spec.sample_id, group_id=spec.group_id, order=order)
            self._begin(offered)

    def _begin(self, admitted: list[str]) -> None:
        """Gives samples that have their place to workers, what is stored of them read before."""
        for sample_id in admitted:
            sample = self._samples[sample_id]
            if sample.end is not None:
                continue  # it was cut while it waited; its place is given back with its end
            if sample.resumed:
                sample.stage = Stage.READING
                self._start_read(sample_id, partial(self._read, sample))
            else:
                self._submit(sample, [])

    async def _read(self, sample: SampleState) -> None:
        """Reads what is stored of a sample, and lets it run.

        Waits for the hosts, which hold what is not stored yet (they are back within SETTLE_S of the
        start), for a place among the reads, and for the store.
        """
        await self._settled()
        graph = await self._stored.graph(sample.spec.sample_id)
        if self._samples.get(sample.spec.sample_id) is not sample:
            return
        if not _is_open(graph):
            self._forget(sample)
            return
        finished = (common_pb2.VERTEX_STATUS_DONE, common_pb2.VERTEX_STATUS_FAILED)
        stored = [vertex for vertex in graph.vertices if vertex.meta.status in finished]
        self._count_stored(sample, stored)
        self._desk.counters["replayed"] += len(stored)
        self._submit(sample, stored)

    def _count_stored(self, sample: SampleState, stored: Iterable[Vertex]) -> None:
        for vertex in stored:
            if vertex.meta.status == common_pb2.VERTEX_STATUS_DONE:
                sample.done.add(vertex.meta.vertex_id)
                _count(sample, vertex)

    def _submit(self, sample: SampleState, stored: list[Vertex]) -> None:
        if sample.cancelled:
            self._end_here(sample, common_pb2.SAMPLE_STATUS_CANCELLED)
            return
        sample.stage = Stage.RUNNING
        self._workers.submit(WorkerSample(spec=sample.spec, stored=stored), crashes=sample.crashes)

    # The workers' side.

    def worker_event(self, slot: WorkerSlot, event: WorkerEvent) -> None:
        """A frame of a worker, its parts in the order in which they depend on each other."""
        for vertex in event.tools:
            self._tool(vertex)
        for call in event.calls:
            sample = self._running(call.sample_id)
            if sample is not None:
                self._desk.call(sample, call)
        for vertex_id in event.cancelled_vertex_ids:
            self._desk.cut(vertex_id)
        for left in event.left:
            sample = self._running(left.sample_id)
            if sample is not None:
                self._leaves(sample, left.policies)
        for end in event.ends:
            sample = self._running(end.sample_id)
            self._workers.ended(slot, end.sample_id)
            if sample is not None and end.reward_job:
                self._score(sample, end)
            elif sample is not None:
                self._ends(sample, end)

    def _score(self, sample: SampleState, end: SampleEnd) -> None:
        """The workflow is done: the reward function comes next, in a process of its own."""
        sample.slot = None
        job = RewardJob(sample_id=end.sample_id, job_json=end.reward_job)

        def scored(result: RewardResult) -> None:
            if result.HasField("failure"):
                end.status = common_pb2.SAMPLE_STATUS_FAILED
                end.failure.CopyFrom(result.failure)
            else:
                end.rewards.CopyFrom(result.rewards)
            if self._samples.get(end.sample_id) is sample and sample.end is None:
                self._ends(sample, end)

        self._rewards.submit(job, scored)

    def worker_took(self, slot: WorkerSlot, sample_id: str) -> None:
        """A sample was given to a worker: from now on its times count, not while it waited."""
        sample = self._samples[sample_id]
        sample.slot = slot
        sample.started_unix_ns = sample.started_unix_ns or time.time_ns()
        sample.started_at = self._loop.time()

    def worker_ready(self, failure: Failure | None) -> None:
        """A worker has imported the workflow, or cannot."""
        if failure is not None:
            self._listener.run_failed(failure)

    def worker_died(self, sample_ids: list[str], word: Failure | None) -> None:
        """A worker ended: its samples run again, from what is stored; a culprit fails."""
        self._desk.counters["worker_deaths"] += 1
        guilty = "" if word is None else word.metadata["sample_id"]
        for sample_id in sample_ids:
            sample = self._samples.get(sample_id)
            if sample is None or sample.end is not None:
                continue
            for vertex_id in list(sample.calls):
                self._desk.detach(vertex_id)
            sample.slot = None
            if not guilty:
                sample.crashes += 1
            if sample_id == guilty:
                self._end_here(sample, common_pb2.SAMPLE_STATUS_FAILED, word)
            elif sample.crashes > self._max_crashes:
                failure = self._poisonous(sample, "" if word is None else word.message)
                self._end_here(sample, common_pb2.SAMPLE_STATUS_FAILED, failure)
            else:
                self._restart(sample)

    def _poisonous(self, sample: SampleState, last_word: str) -> Failure:
        message = (
            f"sample {sample.spec.sample_id}: its worker died {sample.crashes} times "
            f"(worker_restarts = {self._max_crashes}); {last_word or 'see the log of its worker'}"
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
        """A sample whose worker may still ask; of one that was cut it goes on for a moment."""
        sample = self._samples.get(sample_id)
        if sample is None or sample.stage is not Stage.RUNNING or sample.end is not None:
            return None
        return sample

    def _tool(self, vertex: Vertex) -> None:
        sample = self._running(vertex.meta.sample_id)
        if sample is None:
            return
        if vertex.meta.status == common_pb2.VERTEX_STATUS_DONE:
            sample.done.add(vertex.meta.vertex_id)
            sample.num_vertices += 1
        self._desk.counters["tools"] += 1
        sample.writing += 1

        def stored(outcome: int) -> None:
            sample.writing -= 1
            if outcome == WRITE_OUTCOME_DUPLICATE:
                self._desk.counters["duplicates"] += 1
                self.row_found(sample, vertex.meta.vertex_id, vertex.meta.agent)
            else:
                self.call_answered(sample, CallAnswer(vertex_id=vertex.meta.vertex_id))
            self.row_stored(sample)

        self._writer.vertex(vertex, stored)

    def _leaves(self, sample: SampleState, policies: Iterable[str]) -> None:
        """A sample will not call some policies again: the Orchestrator learns it from its row."""
        row = rows.leaving_sample(sample.spec, left=policies, used=sample.used)
        sample.writing += 1

        def stored(_: int) -> None:
            sample.writing -= 1
            self.row_stored(sample)

        self._writer.sample(row, [], stored)

    # The calls' side.

    def call_answered(self, sample: SampleState, answer: CallAnswer) -> None:
        """A call has its stored answer."""
        if sample.slot is not None and sample.stage is Stage.RUNNING:
            sample.slot.outgoing.add().answers.append(answer)

    def row_found(self, sample: SampleState, vertex_id: str, agent: str) -> None:
        """A call's row was stored before with other content: that is what it is answered with."""
        if sample.slot is not None and sample.end is None:
            self._start_read(vertex_id, partial(self._answer_stored, sample, vertex_id, agent))

    async def _answer_stored(self, sample: SampleState, vertex_id: str, agent: str) -> None:
        self.call_answered(sample, await self._stored.answer(vertex_id, agent))

    def row_stored(self, sample: SampleState) -> None:
        """One row less is being written: whoever waited for the last one goes on."""
        if sample.writing:
            return
        if sample.end is not None and sample.stage is Stage.RUNNING:
            self._write_end(sample)
        elif sample.stage is Stage.READING and sample.slot is None and sample.resumed:
            self._go(sample)

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
            self._listener.run_failed(end.failure)
        for vertex_id in list(sample.calls):
            self._desk.cut(vertex_id)
        whole = end.status == common_pb2.SAMPLE_STATUS_DONE
        self._desk.sample_ended(sample.spec.sample_id, whole=whole)
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
            used=sample.used,
            num_vertices=sample.num_vertices,
            versions=(max(sample.min_version, 0), max(sample.max_version, 0)),
            started_unix_ns=sample.started_unix_ns or now_ns,
            finished_unix_ns=now_ns,
        )
        name = common_pb2.SampleStatus.Name(end.status).removeprefix("SAMPLE_STATUS_").lower()
        self._desk.counters[f"samples_{name}"] += 1
        if end.HasField("failure"):
            _log.warning(
                "sample_failed",
                sample=sample.spec.sample_id,
                reason=end.failure.reason,
                message=end.failure.message,
            )
        rows.keep_payloads(sample.cut, max_bytes=MAX_BYTES)
        self._writer.sample(row, sample.cut, lambda _: self._forget(sample))

    def _forget(self, sample: SampleState) -> None:
        version = sample.spec.version
        self._samples.pop(sample.spec.sample_id, None)
        self._ended[sample.spec.sample_id] = None
        if (stored := self._cut.pop(sample.spec.sample_id, None)) is not None:
            stored.set_result(None)
        self._begin(self._admission.ended(sample.spec.sample_id, group_id=sample.spec.group_id))
        self._open[version] -= 1
        if self._open[version] <= 0:
            del self._open[version]
            self._listener.version_done()


def _is_open(graph: GetSampleGraphResponse) -> bool:
    return graph.sample.status == common_pb2.SAMPLE_STATUS_OPEN


def _count(sample: SampleState, vertex: Vertex) -> None:
    if vertex.meta.kind == common_pb2.VERTEX_KIND_AGENT:
        sample.count(vertex.meta.policy, vertex.meta.policy_version)
    else:
        sample.num_vertices += 1
