"""State machines as tables: what may move where, and why. Terminal states are final.

Where a contract has the enum, the values are the lower-case names of its values. docs/states.md is
generated from `MACHINES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar


class VertexStatus(StrEnum):
    """State of a vertex."""

    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class VoidReason(StrEnum):
    """Why a finished vertex of a trained policy is not trained on."""

    NO_REWARD = "no_reward"
    SAMPLE_FAILED = "sample_failed"
    GROUP_DROPPED = "group_dropped"
    ZERO_VARIANCE = "zero_variance"
    REDUNDANT = "redundant"
    REPLAY_DIVERGED = "replay_diverged"
    NON_FINITE = "non_finite"
    OVERLONG = "overlong"
    ROLLED_BACK = "rolled_back"


class SampleStatus(StrEnum):
    """State of a sample attempt."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


class GroupStatus(StrEnum):
    """State of a group."""

    OPEN = "open"
    CLOSED = "closed"
    DROPPED = "dropped"


class RunStatus(StrEnum):
    """State of a run."""

    SUBMITTED = "submitted"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class MicroBatchStatus(StrEnum):
    """State of a micro-batch; only `RECORDED` and what a saved ledger says is stored."""

    RECORDED = "recorded"
    MARKED = "marked"
    ADDED = "added"
    CONSUMED = "consumed"
    DROPPED = "dropped"
    ROLLED_BACK = "rolled_back"


class SegmentStatus(StrEnum):
    """State of a state segment."""

    WRITING = "writing"
    SEALED = "sealed"
    RETIRED = "retired"
    FREED = "freed"


class VersionStatus(StrEnum):
    """State of a version of the team."""

    PENDING = "pending"
    SAVED = "saved"
    COMMITTED = "committed"
    RETIRED = "retired"
    ROLLED_BACK = "rolled_back"


S = TypeVar("S", bound=StrEnum)


class TransitionTable(Generic[S]):
    """Allowed moves of one kind of thing.

    Args:
        moves: By state, where it may move and what moves it.
    """

    def __init__(self, moves: Mapping[S, Mapping[S, str]]) -> None:
        self._moves = MappingProxyType(
            {old: MappingProxyType(dict(new)) for old, new in moves.items()}
        )

    def allows(self, old: S, new: S) -> bool:
        """Says whether `old` may become `new`; staying is not a move."""
        return new in self._moves[old]

    def is_terminal(self, state: S) -> bool:
        """Says whether nothing leaves `state`."""
        return not self._moves[state]

    @property
    def moves(self) -> Mapping[S, Mapping[S, str]]:
        """The table, for documents."""
        return self._moves


VERTEX: TransitionTable[VertexStatus] = TransitionTable(
    {
        VertexStatus.READY: {
            VertexStatus.RUNNING: "sent to an instance",
            VertexStatus.FAILED: "deadline",
            VertexStatus.CANCELLED: "cut before it ran",
        },
        VertexStatus.RUNNING: {
            VertexStatus.READY: "attempt failed, another is allowed",
            VertexStatus.DONE: "first success",
            VertexStatus.FAILED: "attempts used up, or deadline",
            VertexStatus.CANCELLED: "cut by a join, a cancel, or the return",
        },
        VertexStatus.DONE: {},
        VertexStatus.FAILED: {},
        VertexStatus.CANCELLED: {},
    }
)

SAMPLE: TransitionTable[SampleStatus] = TransitionTable(
    {
        SampleStatus.OPEN: {
            SampleStatus.DONE: "workflow returned, reward answered",
            SampleStatus.FAILED: "workflow or reward failed for good",
            SampleStatus.CANCELLED: "cut before its end",
            SampleStatus.SUPERSEDED: "replay diverged",
        },
        SampleStatus.DONE: {},
        SampleStatus.FAILED: {},
        SampleStatus.CANCELLED: {},
        SampleStatus.SUPERSEDED: {},
    }
)

GROUP: TransitionTable[GroupStatus] = TransitionTable(
    {
        GroupStatus.OPEN: {
            GroupStatus.CLOSED: "all samples ended: rows released",
            GroupStatus.DROPPED: "too few succeeded, or filtered: rows void",
        },
        GroupStatus.CLOSED: {},
        GroupStatus.DROPPED: {},
    }
)

RUN: TransitionTable[RunStatus] = TransitionTable(
    {
        RunStatus.SUBMITTED: {
            RunStatus.RUNNING: "an orchestrator took it",
            RunStatus.STOPPED: "stopped by a user",
            RunStatus.FAILED: "could not start",
        },
        RunStatus.RUNNING: {
            RunStatus.FINISHED: "last version committed",
            RunStatus.STOPPED: "stopped by a user",
            RunStatus.FAILED: "an error that a user must mend",
        },
        # A stopped or failed run can be resumed; a finished one is history.
        RunStatus.STOPPED: {RunStatus.RUNNING: "resumed"},
        RunStatus.FAILED: {RunStatus.RUNNING: "resumed"},
        RunStatus.FINISHED: {},
    }
)

MICRO_BATCH: TransitionTable[MicroBatchStatus] = TransitionTable(
    {
        MicroBatchStatus.RECORDED: {
            MicroBatchStatus.MARKED: "its rows are marked on their shards",
            MicroBatchStatus.ROLLED_BACK: "batch attempt abandoned",
        },
        MicroBatchStatus.MARKED: {
            MicroBatchStatus.ADDED: "gradient finite, added to the sum",
            MicroBatchStatus.DROPPED: "gradient not finite: rows void",
            MicroBatchStatus.ROLLED_BACK: "batch attempt abandoned",
        },
        MicroBatchStatus.ADDED: {
            MicroBatchStatus.MARKED: "process died before the sum was saved",
            MicroBatchStatus.CONSUMED: "in the newest saved ledger",
            MicroBatchStatus.ROLLED_BACK: "batch attempt abandoned",
        },
        # Saved, and yet not final: the memory tier can be lost with its host.
        MicroBatchStatus.CONSUMED: {MicroBatchStatus.ROLLED_BACK: "its state was lost"},
        MicroBatchStatus.DROPPED: {},
        MicroBatchStatus.ROLLED_BACK: {},
    }
)

SEGMENT: TransitionTable[SegmentStatus] = TransitionTable(
    {
        SegmentStatus.WRITING: {
            SegmentStatus.SEALED: "publisher sealed it: visible, immutable",
            SegmentStatus.FREED: "replaced, or its publisher is gone",
        },
        SegmentStatus.SEALED: {SegmentStatus.RETIRED: "nothing that is kept names it"},
        SegmentStatus.RETIRED: {SegmentStatus.FREED: "last lease closed"},
        SegmentStatus.FREED: {},
    }
)

VERSION: TransitionTable[VersionStatus] = TransitionTable(
    {
        VersionStatus.PENDING: {
            VersionStatus.SAVED: "every policy with consumed rows saved its set",
            VersionStatus.ROLLED_BACK: "batch attempt abandoned",
        },
        VersionStatus.SAVED: {
            VersionStatus.COMMITTED: "manifest written",
            VersionStatus.ROLLED_BACK: "batch attempt abandoned: sets deleted",
        },
        VersionStatus.COMMITTED: {
            VersionStatus.RETIRED: "newer versions are kept instead",
            VersionStatus.ROLLED_BACK: "memory lost before it was whole on disk",
        },
        VersionStatus.RETIRED: {},
        VersionStatus.ROLLED_BACK: {},
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One state machine with its words, for documents.

    Attributes:
        name: What moves.
        text: What its states mean for the reader.
        table: The moves.
        start: State that it begins in.
    """

    name: str
    text: str
    table: TransitionTable[Any]
    start: StrEnum


MACHINES: Final = (
    Machine(
        name="Vertex",
        text="One call of an agent, tool or environment. The store keeps ended ones; whatever "
        "arrives after the first accepted end is kept as a duplicate and never used.",
        table=VERTEX,
        start=VertexStatus.READY,
    ),
    Machine(
        name="Sample",
        text="One attempt at one execution of the workflow.",
        table=SAMPLE,
        start=SampleStatus.OPEN,
    ),
    Machine(
        name="Group",
        text="The samples of one query. Its end releases or voids every row below it.",
        table=GROUP,
        start=GroupStatus.OPEN,
    ),
    Machine(
        name="Micro-batch",
        text="Rows of one policy on their way through its trainer. The record owns its rows; the "
        "newest saved ledger alone says that it is consumed.",
        table=MICRO_BATCH,
        start=MicroBatchStatus.RECORDED,
    ),
    Machine(
        name="Segment",
        text="Named buffers of a policy's state, mapped from shared memory or disk.",
        table=SEGMENT,
        start=SegmentStatus.WRITING,
    ),
    Machine(
        name="Version",
        text="The team's weights after one more batch.",
        table=VERSION,
        start=VersionStatus.PENDING,
    ),
    Machine(name="Run", text="One training job.", table=RUN, start=RunStatus.SUBMITTED),
)
"""Every state machine."""
