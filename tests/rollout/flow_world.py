"""The samples of a run around parts that do as they are told: a store that answers when it is let.

The flow and the admission are the real ones; calls are not made.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as store_pb2
from flexmarl.api.meg_store.v1.graph_pb2 import Sample, Vertex
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.api.rollout.v1.worker_pb2 import SampleEnd, WorkerEvent, WorkerSample
from flexmarl.core.admission import Admission
from flexmarl.core.ids import BatchId, GroupId, SampleId
from flexmarl.rollout.dispatcher.sample_flow import SampleFlow
from flexmarl.rollout.dispatcher.workers import WorkerSlot
from flexmarl.runtime.aio import Background

OPEN = common_pb2.SAMPLE_STATUS_OPEN


class Desk:
    """Counts; no sample of this world makes a call."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def cut(self, vertex_id: str) -> None:
        raise AssertionError("no call was made")

    detach = cut

    def sample_ended(self, sample_id: str, *, whole: bool) -> None:
        self.counters["ended"] += 1


class Nobody:
    """Whom an ended dispatcher tells."""

    def version_done(self) -> None:
        pass


class FlowWorld:
    """See the module.

    Attributes:
        held: What the store has not answered yet, oldest first.
        rows: Samples as they are stored.
        waiting: Samples that no worker has taken.
        running: Samples in workers, by slot.
        done: Versions of which the last open sample has ended, as the flow said it.
    """

    def __init__(self, *, max_queries: int | None = None, max_samples: int | None = None) -> None:
        self.held: list[Callable[[], None]] = []
        self.rows: dict[str, Sample] = {}
        self.graphs: dict[str, list[Vertex]] = {}
        self.waiting: dict[str, WorkerSample] = {}
        self.running: dict[str, WorkerSlot] = {}
        self.slots = [WorkerSlot(0), WorkerSlot(1)]
        self.num_done = 0
        self.desk = Desk()
        self.flow = self.new_flow(max_queries, max_samples)

    def new_flow(self, max_queries: int | None, max_samples: int | None) -> SampleFlow:
        flow = SampleFlow(
            stored=self, background=Background(_fail), listener=self,
            admission=Admission(max_queries=max_queries, max_samples_per_query=max_samples),
            settled=self.settled, max_crashes=1,
        )  # fmt: skip
        flow.wire(desk=self.desk, writer=self, workers=self, rewards=self)
        flow.activate(0)
        return flow

    def restart(self, max_queries: int | None, max_samples: int | None) -> None:
        """Another dispatcher, over what is stored; the one before is told nothing any more."""
        self.flow._samples.clear()  # what it still reads is nobody's
        self.flow._listener = Nobody()
        self.held.clear()
        self.waiting.clear()
        self.running.clear()
        self.slots = [WorkerSlot(0), WorkerSlot(1)]
        self.flow = self.new_flow(max_queries, max_samples)

    # The store.

    def sample(self, row: Sample, vertices, on_stored) -> None:
        before = self.rows.get(row.sample_id)

        def store() -> None:
            outcome = store_pb2.WRITE_OUTCOME_ACCEPTED
            if before is not None and self.rows[row.sample_id].status != OPEN:
                outcome = store_pb2.WRITE_OUTCOME_DUPLICATE
            elif before is not None and before == row:
                outcome = store_pb2.WRITE_OUTCOME_UNCHANGED
            else:
                self.rows[row.sample_id] = row
            on_stored(outcome)

        self.held.append(store)

    def stores(self) -> None:
        """Answers all that it was asked by now."""
        held, self.held = self.held, []
        for store in held:
            store()

    async def graph(self, sample_id: str) -> store_pb2.GetSampleGraphResponse:
        return store_pb2.GetSampleGraphResponse(sample=self.rows[sample_id])

    async def find_graph(self, sample_id: str) -> store_pb2.GetSampleGraphResponse | None:
        return await self.graph(sample_id) if sample_id in self.rows else None

    async def settled(self) -> None:
        await asyncio.sleep(0)

    # Workers, and rewards that nobody asks for.

    def submit(self, sample: WorkerSample, *, crashes: int) -> None:
        assert sample.spec.sample_id not in self.waiting | self.running, "runs once at a time"
        self.waiting[sample.spec.sample_id] = sample

    def withdraw(self, sample_id: str) -> bool:
        return self.waiting.pop(sample_id, None) is not None

    def take(self, sample_id: str, slot: int = 0) -> None:
        """A worker takes a sample."""
        del self.waiting[sample_id]
        self.running[sample_id] = self.slots[slot]
        self.flow.worker_took(self.slots[slot], sample_id)

    def end(self, sample_id: str, status=common_pb2.SAMPLE_STATUS_DONE) -> None:
        """Its workflow returns."""
        end = SampleEnd(sample_id=sample_id, status=status)
        self.flow.worker_event(self.running[sample_id], WorkerEvent(ends=[end]))

    def ended(self, slot: WorkerSlot, sample_id: str) -> None:
        self.running.pop(sample_id, None)

    def die(self, slot: int = 0) -> None:
        """A worker ends, with all samples in it."""
        lost = [name for name, where in self.running.items() if where is self.slots[slot]]
        for name in lost:
            del self.running[name]
        self.flow.worker_died(lost, None)

    # The run.

    def version_done(self) -> None:
        self.num_done += 1
        assert not self.flow.open_versions()

    def run_failed(self, failure) -> None:
        raise AssertionError(failure)


def _fail(name: str, error: BaseException) -> None:
    raise error


def spec(ordinal: int, *, group: int = 0) -> SampleSpec:
    group_id = GroupId(BatchId(0), group)
    return SampleSpec(
        sample_id=str(SampleId(group_id, ordinal)), group_id=str(group_id), ordinal=ordinal,
        group_ordinal=group,
    )  # fmt: skip
