"""One policy within a batch, training side: from released rows to its update.

    released rows -> record -> marks
                       |  gradients: in the sum, or dropped whole (non-finite)
    subgraph closed ---+-> all records in the sum -> update -> done

A record counts as in the sum while the process that holds the sum lives; after its loss only the
newest saved ledger counts (`adopt`), and what it lacks is handed out again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from flexmarl.core.demands import Place
from flexmarl.core.ids import BatchId, micro_batch_id
from flexmarl.core.micro_batches import RowQueue
from flexmarl.core.run_effects import CreateMicroBatch, MarkRows
from flexmarl.core.run_events import StateFact
from flexmarl.core.training_estimates import Estimates
from flexmarl.core.training_rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRules:
    """What the run's core needs to know of a policy."""

    trained: bool = True
    world_size: int = 1
    max_world_size: int = 1
    micro_batch_rows: int = 64
    micro_batch_tokens: int | None = None


class RecordStage(Enum):
    """Where a micro-batch stands."""

    CREATING = auto()
    READY = auto()
    COMPUTING = auto()
    IN_SUM = auto()
    DROPPED = auto()


@dataclass(slots=True)
class Record:
    """A micro-batch of the open batch; `num_tokens` are those that its passes go over."""

    micro_batch_id: str
    rows: tuple[Row, ...]
    stage: RecordStage
    marked: bool = False
    marking: bool = False
    voided: bool = False
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = sum(row.num_tokens for row in self.rows)


class OperationKind(Enum):
    """What runs on a bound policy."""

    BIND = auto()
    COMPUTE = auto()
    SAVE = auto()
    APPLY = auto()
    SUSPEND = auto()


@dataclass(slots=True)
class Binding:
    """A policy's hold on slots. `number` is its own: answers about an older one are left aside.

    `trainer` leads where slots of further ones (`beyond`) are held too: it is told what to do.
    `idle_since` is when the last operation on it ended.
    """

    number: int
    trainer: str
    slots: tuple[str, ...]
    since: float
    operation: OperationKind | None = None
    operation_since: float = 0.0
    idle_since: float = 0.0
    beyond: tuple[Place, ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        """Its slots by trainer, the leading one first."""
        return (Place(self.trainer, self.slots), *self.beyond)

    @property
    def num_slots(self) -> int:
        """Its slots, of all trainers."""
        return sum(len(place.slots) for place in self.places)

    def begin(self, operation: OperationKind, *, now: float) -> None:
        """An operation starts on it."""
        self.operation = operation
        self.operation_since = now


@dataclass(slots=True)
class PolicyTraining:
    """One policy: its queue and records of the open batch, its binding across batches."""

    name: str
    rules: PolicyRules
    queue: RowQueue = field(init=False)
    records: dict[str, Record] = field(default_factory=dict)
    subgraph_closed: bool = False
    applied: bool = False
    has_state: bool = False
    binding: Binding | None = None
    last_trainer: str | None = None
    unsaved_since: float | None = None
    failures: int = 0
    retry_at: float | None = None
    work_since: float | None = None
    estimates: Estimates = field(default_factory=Estimates)
    _saved: StateFact | None = None
    _ahead: StateFact | None = None
    _next_ordinal: int = 0
    _batch: BatchId = field(default_factory=lambda: BatchId(0))

    def __post_init__(self) -> None:
        self.queue = self._new_queue()

    # Where it stands

    @property
    def ready(self) -> list[Record]:
        """Records that wait for their gradients, in order of creation."""
        return [r for r in self.records.values() if r.stage is RecordStage.READY]

    @property
    def in_sum(self) -> tuple[str, ...]:
        """Records whose gradients are in the sum, or in the update."""
        stages = self.records.values()
        return tuple(r.micro_batch_id for r in stages if r.stage is RecordStage.IN_SUM)

    @property
    def summed(self) -> bool:
        """Whether no further row can come and every record is in the sum or dropped."""
        return (
            self.subgraph_closed
            and not self.queue
            and all(
                r.stage in (RecordStage.IN_SUM, RecordStage.DROPPED) for r in self.records.values()
            )
        )

    @property
    def apply_due(self) -> bool:
        """Whether the update can and must be made; without a row in the sum there is none."""
        return self.summed and not self.applied and bool(self.in_sum)

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do for the policy in this batch."""
        return (
            self.summed
            and (self.applied or not self.in_sum)
            and all(r.marked for r in self.records.values())
        )

    @property
    def work(self) -> float:
        """Ready work in tokens, what is being recorded included; an update counts 1."""
        stages = (RecordStage.CREATING, RecordStage.READY)
        records = (r for r in self.records.values() if r.stage in stages)
        return float(sum(max(r.num_tokens, 1) for r in records) + self.apply_due)

    def remaining(self, *, share_closed: float) -> float:
        """Estimate of the work left in the batch, in tokens.

        A batch has as much as the last one; the first one as much as its closed groups let expect.

        Args:
            share_closed: Share of the batch's groups that have ended.
        """
        todo = self.work + self.queue.num_tokens
        if self.subgraph_closed:
            return todo
        seen = self.queue.num_tokens + sum(r.num_tokens for r in self.records.values())
        expected = self.estimates.batch_tokens or (seen / share_closed if share_closed else 0.0)
        return todo + max(expected - seen, 0.0)

    @property
    def is_ahead(self) -> bool:
        """Whether its saved state was sent ahead of its binding already, or there is none."""
        return self._ahead == self._saved

    @property
    def rows_waiting(self) -> int:
        """Released rows that are in no sum yet."""
        stages = (RecordStage.CREATING, RecordStage.READY, RecordStage.COMPUTING)
        return len(self.queue) + sum(
            len(r.rows) for r in self.records.values() if r.stage in stages
        )

    # What happens

    def begin_batch(self, batch: BatchId) -> None:
        """Forget the last batch; a binding stays."""
        self._batch = batch
        self._next_ordinal = 0
        if self.records:
            self.estimates.batch_tokens = sum(r.num_tokens for r in self.records.values())
        self.queue = self._new_queue()
        self.records.clear()
        self.subgraph_closed = not self.rules.trained
        self.applied = False
        self.unsaved_since = None

    def _new_queue(self) -> RowQueue:
        return RowQueue(
            rows_per_micro_batch=self.rules.micro_batch_rows,
            tokens_per_micro_batch=self.rules.micro_batch_tokens,
        )

    def restore(self, micro_batch: str, rows: tuple[Row, ...], *, voided: bool) -> None:
        """Take up a stored record; whether it is in a sum, `adopt` says."""
        stage = RecordStage.DROPPED if voided else RecordStage.READY
        self.records[micro_batch] = Record(micro_batch, rows, stage, voided=voided)
        # Records are written side by side, so a crash may have left a gap before this one.
        ordinal = int(micro_batch.split("-")[1][1:])
        self._next_ordinal = max(self._next_ordinal, ordinal + 1)

    def adopt(self, state: StateFact) -> None:
        """Believe the newest saved state alone."""
        self._saved = state
        self.has_state = True
        self.applied = state.has_updated(self._batch.batch)
        self.unsaved_since = None
        for record in self.records.values():
            if record.stage is RecordStage.CREATING or record.voided:
                # Rows that are void already must not come into a sum, whatever was saved.
                continue
            if record.micro_batch_id in state.ledger:
                record.stage = RecordStage.IN_SUM
            elif record.micro_batch_id in state.dropped:
                record.stage = RecordStage.DROPPED
            else:
                record.stage = RecordStage.READY

    def note_work(self, *, now: float) -> None:
        """Remember since when there is ready work."""
        if not self.work and self.has_state:
            self.work_since = None
        elif self.work_since is None:
            self.work_since = now

    def sent_ahead(self) -> None:
        """Its saved state is loaded ahead of its binding."""
        self._ahead = self._saved

    def unbind(self) -> None:
        """The binding is gone, and with it what was not saved."""
        self.binding = None
        if self._saved is not None:
            self.adopt(self._saved)

    def computed(self, micro_batch: str, *, non_finite: bool, now: float) -> None:
        """A micro-batch is in the sum, or was dropped whole; neither is saved yet."""
        record = self.records[micro_batch]
        record.stage = RecordStage.DROPPED if non_finite else RecordStage.IN_SUM
        if self.unsaved_since is None:
            self.unsaved_since = now

    def created(self, micro_batch: str) -> None:
        """The store has the record."""
        self.records[micro_batch].stage = RecordStage.READY

    def marked(self, micro_batch: str) -> None:
        """The store has the marks."""
        self.records[micro_batch].marked = True

    def form(self) -> list[CreateMicroBatch]:
        """Records to write for the rows that wait."""
        effects: list[CreateMicroBatch] = []
        for rows in self.queue.form(flush=self.subgraph_closed):
            new_id = micro_batch_id(self._batch, ordinal=self._next_ordinal, policy=self.name)
            self._next_ordinal += 1
            self.records[new_id] = Record(new_id, rows, RecordStage.CREATING)
            effects.append(
                CreateMicroBatch(
                    batch=self._batch.batch,
                    policy=self.name,
                    micro_batch_id=new_id,
                    rows=rows,
                    reason="the last, partial one" if self.subgraph_closed else "enough rows",
                )
            )
        return effects

    def marks_due(self) -> Iterable[MarkRows]:
        """Marks to write."""
        for record in self.records.values():
            if record.stage is RecordStage.CREATING or record.marked or record.marking:
                continue
            record.marking = True
            yield MarkRows(
                batch=self._batch.batch,
                policy=self.name,
                micro_batch_id=record.micro_batch_id,
                rows=record.rows,
                reason="the record is written",
            )
