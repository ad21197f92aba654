"""What the run's core is told: ends of effects, news, losses, and what the store held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexmarl.core.dataset_order import Cursor
from flexmarl.core.run_effects import GroupSpec, Work
from flexmarl.core.states import GroupStatus, VoidReason
from flexmarl.core.training_rows import Row, RunFailure, SampleFact


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFact:
    """What a policy's state record says.

    Attributes:
        version: Version that the weights belong to.
        ledger: Micro-batches in the gradient sum, or applied by the update that made the set.
        dropped: Micro-batches that were dropped whole.
        applied: Whether an update made this set.
        metrics: Numbers that training reported.
    """

    version: int
    ledger: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    applied: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    def has_updated(self, batch: int) -> bool:
        """Whether the policy's update of a batch is made: it takes no further row of it."""
        return self.applied and self.version == batch + 1


@dataclass(frozen=True, slots=True)
class RowsRead:
    """End of `ReadRows`."""

    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class AdvantagesMade:
    """End of `ComputeAdvantages`: an advantage for each value asked about."""

    scopes: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class TrainerOpened:
    """End of `OpenTrainer`."""

    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """End of `Compute`."""

    non_finite: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateSaved:
    """End of `Bind`, `SaveGradients`, `Apply` and `Suspend`: the newest saved state."""

    state: StateFact
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counted:
    """End of `CountVertices`: rows that are neither consumed nor void, and void ones by reason."""

    open_rows: tuple[Row, ...]
    voided: Mapping[VoidReason, int] = field(default_factory=dict)


Result = RowsRead | AdvantagesMade | TrainerOpened | Computed | StateSaved | Counted | None


@dataclass(frozen=True, slots=True)
class EffectDone:
    """An effect took effect."""

    effect: Work
    result: Result = None


@dataclass(frozen=True, slots=True)
class EffectFailed:
    """An effect failed for good; the driver has tried long enough."""

    effect: Work
    failure: RunFailure


@dataclass(frozen=True, slots=True)
class SampleChanged:
    """The store told of a sample."""

    sample: SampleFact


@dataclass(frozen=True, slots=True)
class RolloutLost:
    """The dispatcher was started anew: it knows nothing of the run."""

    reason: str


@dataclass(frozen=True, slots=True)
class TrainerLost:
    """A trainer was started anew: its bindings are gone."""

    trainer: str
    reason: str


@dataclass(frozen=True, slots=True)
class FatalReported:
    """A service says that the run cannot go on."""

    failure: RunFailure


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer is due."""

    name: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A user wants the run to stop, at once or after the commit of the open batch."""

    finish_batch: bool


Event = (
    EffectDone
    | EffectFailed
    | SampleChanged
    | RolloutLost
    | TrainerLost
    | FatalReported
    | TimerFired
    | StopRequested
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group of the open batch, as the store has it; `rows` only where it is terminal.

    `lost`: it went with its store shard. It is dropped, and its query comes again; closed where
    every policy's update of the batch was made already.
    """

    spec: GroupSpec
    status: GroupStatus
    rows: tuple[Row, ...] = ()
    claimable: frozenset[str] = frozenset()
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """A micro-batch record of the open batch; `voided` when its rows are void already."""

    micro_batch_id: str
    policy: str
    vertex_ids: tuple[str, ...]
    voided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """All that the store holds of a run: the only thing that a restart needs.

    Attributes:
        version: Newest committed version; None before version 0.
        cursor: Dataset cursor of its manifest.
        groups: Groups of the open batch, with their rows where they are terminal.
        samples: Sample attempts of the open batch.
        records: Micro-batch records of the open batch.
        states: Newest state record per policy.
        evaluated: Sample attempts of the version's evaluation that ended.
        returned_to: Versions that the run returned to.
    """

    version: int | None = None
    cursor: Cursor = field(default_factory=Cursor)
    groups: tuple[StoredGroup, ...] = ()
    samples: tuple[SampleFact, ...] = ()
    records: tuple[StoredRecord, ...] = ()
    states: Mapping[str, StateFact] = field(default_factory=dict)
    evaluated: tuple[SampleFact, ...] = ()
    returned_to: tuple[int, ...] = ()
