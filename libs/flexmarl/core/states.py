"""State machines as tables: what may move where. Terminal states are final.

The values are the lower-case names of the enum values in the contracts.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar


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


S = TypeVar("S", bound=StrEnum)


class TransitionTable(Generic[S]):
    """Allowed moves of one kind of thing."""

    def __init__(self, moves: Mapping[S, frozenset[S]]) -> None:
        self._moves = dict(moves)

    def allows(self, old: S, new: S) -> bool:
        """Says whether `old` may become `new`; staying is not a move."""
        return new in self._moves[old]

    def is_terminal(self, state: S) -> bool:
        """Says whether nothing leaves `state`."""
        return not self._moves[state]

    @property
    def moves(self) -> Mapping[S, frozenset[S]]:
        """The table, for documents."""
        return self._moves


VERTEX: TransitionTable[VertexStatus] = TransitionTable(
    {
        VertexStatus.READY: frozenset(
            {VertexStatus.RUNNING, VertexStatus.FAILED, VertexStatus.CANCELLED}
        ),
        # Back to READY when an attempt failed and another one is allowed.
        VertexStatus.RUNNING: frozenset(
            {VertexStatus.READY, VertexStatus.DONE, VertexStatus.FAILED, VertexStatus.CANCELLED}
        ),
        VertexStatus.DONE: frozenset(),
        VertexStatus.FAILED: frozenset(),
        VertexStatus.CANCELLED: frozenset(),
    }
)

SAMPLE: TransitionTable[SampleStatus] = TransitionTable(
    {
        SampleStatus.OPEN: frozenset(
            {
                SampleStatus.DONE,
                SampleStatus.FAILED,
                SampleStatus.CANCELLED,
                SampleStatus.SUPERSEDED,
            }
        ),
        SampleStatus.DONE: frozenset(),
        SampleStatus.FAILED: frozenset(),
        SampleStatus.CANCELLED: frozenset(),
        SampleStatus.SUPERSEDED: frozenset(),
    }
)

GROUP: TransitionTable[GroupStatus] = TransitionTable(
    {
        GroupStatus.OPEN: frozenset({GroupStatus.CLOSED, GroupStatus.DROPPED}),
        GroupStatus.CLOSED: frozenset(),
        GroupStatus.DROPPED: frozenset(),
    }
)

RUN: TransitionTable[RunStatus] = TransitionTable(
    {
        RunStatus.SUBMITTED: frozenset({RunStatus.RUNNING, RunStatus.STOPPED, RunStatus.FAILED}),
        RunStatus.RUNNING: frozenset({RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.FAILED}),
        # A stopped or failed run can be resumed; a finished one is history.
        RunStatus.STOPPED: frozenset({RunStatus.RUNNING}),
        RunStatus.FAILED: frozenset({RunStatus.RUNNING}),
        RunStatus.FINISHED: frozenset(),
    }
)
