"""What the dispatcher keeps of samples and calls in progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from flexmarl.api.meg_store.v1.graph_pb2 import Vertex
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.api.rollout.v1.worker_pb2 import AgentCall, SampleEnd
from flexmarl.core.ids import SampleId
from flexmarl.rollout.dispatcher.results import KeptTokens
from flexmarl.rollout.dispatcher.workers import WorkerSlot


def spec_of(sample_id: str) -> SampleSpec | None:
    """What a sample's id alone says of it; None when it is no id of a sample."""
    try:
        sample = SampleId.parse(sample_id)
    except ValueError:
        return None
    batch = sample.group.batch
    return SampleSpec(
        sample_id=sample_id,
        group_id=str(sample.group),
        batch=batch.batch,
        batch_attempt=batch.attempt,
        ordinal=sample.ordinal,
        sample_attempt=sample.attempt,
        group_ordinal=sample.group.ordinal,
        evaluation=batch.evaluation,
        version=batch.batch,
    )


class Stage(Enum):
    """Where a sample is."""

    OPENING = auto()
    """Its row is being written."""
    WAITING = auto()
    """Its version is not active yet."""
    READING = auto()
    """What is stored of it is being read."""
    RUNNING = auto()
    """It is in a worker, or waits for room in one."""
    ENDING = auto()
    """Its end is being written."""


@dataclass(slots=True)
class SampleState:
    """One sample attempt in progress.

    Attributes:
        spec: The sample.
        stage: Where it is.
        resumed: Whether vertices of it may be stored already.
        done: Vertices that are stored as finished.
        calls: Calls that wait for an answer, by vertex id.
        writing: Rows of it that are being written: its end waits for them.
        cut: Rows of cut calls, written with its end.
        end: How it ended.
        slot: Worker that runs it.
        crashes: Workers that died with it.
        cancelled: Whether it was told to stop before it ran.
        used: Policies that finished a vertex of it.
        num_vertices: Finished vertices, tools included.
        min_version: Smallest version that sampled a token; -1 before the first.
        max_version: Largest version that sampled a token.
        started_unix_ns: When it was given to a worker first.
        started_at: The same on the loop's clock, for the last start.
    """

    spec: SampleSpec
    stage: Stage = Stage.OPENING
    resumed: bool = False
    done: set[str] = field(default_factory=set)
    calls: dict[str, CallState] = field(default_factory=dict)
    writing: int = 0
    cut: list[Vertex] = field(default_factory=list)
    end: SampleEnd | None = None
    slot: WorkerSlot | None = None
    crashes: int = 0
    cancelled: bool = False
    used: set[str] = field(default_factory=set)
    num_vertices: int = 0
    min_version: int = -1
    max_version: int = -1
    started_unix_ns: int = 0
    started_at: float = 0.0

    def count(self, policy: str, version: int) -> None:
        """Counts a finished vertex of an agent."""
        self.num_vertices += 1
        self.used.add(policy)
        self.min_version = version if self.min_version < 0 else min(self.min_version, version)
        self.max_version = max(self.max_version, version)

    def forget_progress(self) -> None:
        """Back to before its start: it will be replayed."""
        self.done.clear()
        self.calls.clear()
        self.cut.clear()
        self.used.clear()
        self.num_vertices = 0
        self.min_version = self.max_version = -1


@dataclass(slots=True)
class CallState:
    """One call that waits for an answer.

    Attributes:
        sample: Its sample.
        call: What the worker asked.
        ready_unix_ns: When it asked.
        deadline: When the call must have ended, on the loop's clock.
        dispatched_unix_ns: When its last attempt was sent; 0 before.
        attempt: Number of its last attempt.
        kept: What moved attempts of it drew; None while its attempts start from nothing.
    """

    sample: SampleState
    call: AgentCall
    ready_unix_ns: int
    deadline: float
    dispatched_unix_ns: int = 0
    attempt: int = 0
    kept: KeptTokens | None = None
