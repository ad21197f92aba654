"""What the run's core wants done: effects as data, each with what it waits for and why.

The driver executes them, independent ones side by side, and answers each with `EffectDone` or
`EffectFailed` (see `run_events`).
"""

from __future__ import annotations

from dataclasses import dataclass

from flexmarl.core.dataset_order import Cursor
from flexmarl.core.demands import Place
from flexmarl.core.ids import SampleId
from flexmarl.core.states import GroupStatus, RunStatus, VoidReason
from flexmarl.core.training_rows import Row, RowAdvantage, RowVoid, RunFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group to admit; `repeats`: it has the query of the one it replaces, which was lost."""

    group_id: str
    ordinal: int
    query_index: int
    replaces: str = ""
    repeats: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRollout:
    """Open the run at the dispatcher."""

    epoch: int
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return "rollout: open the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTrainer:
    """Open the run at a trainer."""

    trainer: str
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"trainer {self.trainer}: open the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitGroups:
    """Write groups of a batch to the store."""

    batch: int
    groups: tuple[GroupSpec, ...]
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"store: admit {len(self.groups)} group(s) of batch {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSamples:
    """Hand samples to the dispatcher; `epoch` tells which opening of it."""

    batch: int
    epoch: int
    samples: tuple[SampleId, ...]
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"rollout: take {len(self.samples)} sample(s) of batch {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelSamples:
    """Cut samples."""

    samples: tuple[SampleId, ...]
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"rollout: cut {len(self.samples)} sample(s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRows:
    """Read the meta columns of a group's finished vertices."""

    batch: int
    group_id: str
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"store: rows of group {self.group_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeAdvantages:
    """Ask the run's own estimator about a group: one advantage per value of each scope."""

    batch: int
    epoch: int
    group_id: str
    scopes: tuple[tuple[float, ...], ...]
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"rollout: advantages of group {self.group_id} by the run's own estimator"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseGroup:
    """Close or drop a group; release and void its rows in the same write."""

    batch: int
    group_id: str
    status: GroupStatus
    drop_reason: VoidReason | None
    released: tuple[RowAdvantage, ...]
    voided: tuple[RowVoid, ...]
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"store: close group {self.group_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSubgraphs:
    """Mark that no further row of these policies can come in the batch."""

    batch: int
    policies: tuple[str, ...]
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"store: close the subgraphs of batch {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateMicroBatch:
    """Write a micro-batch record."""

    batch: int
    policy: str
    micro_batch_id: str
    rows: tuple[Row, ...]
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"store: record of micro-batch {self.micro_batch_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkRows:
    """Mark the rows of a record; done again after a crash in between."""

    batch: int
    policy: str
    micro_batch_id: str
    rows: tuple[Row, ...]
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"store: marks of micro-batch {self.micro_batch_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """Acquire the policy's term and bind it to slots; `binding` tells which binding this is.

    The trainer leads; where slots of further ones (`beyond`) are bound, too, it borrows them.
    """

    policy: str
    binding: int
    trainer: str
    slots: tuple[str, ...]
    beyond: tuple[Place, ...] = ()
    version: int | None
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        more = "".join(f"; {', '.join(p.slots)} of trainer {p.trainer}" for p in self.beyond)
        return f"trainer {self.trainer}: bind {self.policy} to {', '.join(self.slots)}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Add the gradients of a micro-batch to its policy's sum."""

    policy: str
    binding: int
    trainer: str
    batch: int
    micro_batch_id: str
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"trainer {self.trainer}: gradients of {self.micro_batch_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveGradients:
    """Save a policy's sum and ledger."""

    policy: str
    binding: int
    trainer: str
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"trainer {self.trainer}: save the gradients of {self.policy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Make the policy's update of a batch."""

    policy: str
    binding: int
    trainer: str
    batch: int
    micro_batch_ids: tuple[str, ...]
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"trainer {self.trainer}: update {self.policy} with batch {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend:
    """Save a policy's state and take its slots back."""

    policy: str
    binding: int
    trainer: str
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"trainer {self.trainer}: suspend {self.policy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Load a policy's saved state where it is bound next; nothing waits for it."""

    policy: str
    trainer: str
    slots: tuple[str, ...]
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"trainer {self.trainer}: load {self.policy} ahead of its turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareWeights:
    """Announce a policy's weights of a coming version; nothing waits for it."""

    version: int
    policy: str
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"rollout: hear of the weights of {self.policy} at version {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidRows:
    """Void rows that were left over."""

    batch: int
    rows: tuple[RowVoid, ...]
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"store: void {len(self.rows)} row(s) of batch {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CountVertices:
    """Have the store prove that finished = consumed + void."""

    batch: int
    consumed: tuple[str, ...]
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"store: account of batch {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Write the manifest of `version`, made of the new states of `stepped` and the old others."""

    version: int
    expected_version: int | None
    stepped: tuple[str, ...]
    cursor: Cursor
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"store: commit version {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivateVersion:
    """Tell the dispatcher which version to sample under; `epoch` tells which opening of it."""

    version: int
    epoch: int
    reason: str

    @property
    def waits(self) -> str:
        """What a person reads while it is not done."""
        return f"rollout: activate version {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Answer with `TimerFired(name)` at `at`; a later one of the same name replaces it."""

    name: str
    at: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """Nothing more is to be done: write the run's last state and close it everywhere."""

    status: RunStatus
    failure: RunFailure | None
    reason: str


Work = (
    OpenRollout
    | OpenTrainer
    | AdmitGroups
    | StartSamples
    | CancelSamples
    | ReadRows
    | ComputeAdvantages
    | CloseGroup
    | CloseSubgraphs
    | CreateMicroBatch
    | MarkRows
    | Bind
    | Compute
    | SaveGradients
    | Apply
    | Suspend
    | Prefetch
    | PrepareWeights
    | VoidRows
    | CountVertices
    | Commit
    | ActivateVersion
)
"""Effects that end with `EffectDone` or `EffectFailed`."""

TrainerWork = Bind | Compute | SaveGradients | Apply | Suspend
"""Effects on a bound policy: when they fail, the binding is lost and another one is made."""

Effect = Work | SetTimer | EndRun
