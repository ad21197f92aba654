"""The life of a run: events in, effects out. Holds no clock and does no I/O.

    open services -> set 0 of every policy -> commit 0 -> activate 0
    for batch b:  admit -> samples -> groups close -> micro-batches -> gradients -> updates
                  all groups terminal, all updates made -> rows add up -> commit b+1 -> activate b+1
    the last version is committed and active -> finished

The core is level-triggered: after every event it looks at what is known and asks for what is due
and not asked for yet. A restart therefore is nothing special: what the store holds is fed in
(`StoredRun`), and the same rules go on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from flexmarl.core.batch import BatchGroups
from flexmarl.core.batch_end import BatchEnd
from flexmarl.core.batch_rules import BatchRules
from flexmarl.core.closure import FailureWatch
from flexmarl.core.dataset_order import DatasetOrder
from flexmarl.core.evaluation import Evaluation, EvaluationRules
from flexmarl.core.idle import IdleWatch
from flexmarl.core.ids import BatchId, SampleId, is_evaluation
from flexmarl.core.recovery import restore_batch
from flexmarl.core.run_effects import (
    ActivateVersion,
    AdmitGroups,
    Apply,
    Bind,
    CancelSamples,
    CloseGroup,
    CloseSubgraphs,
    Commit,
    Compute,
    ComputeAdvantages,
    CountVertices,
    CreateMicroBatch,
    Effect,
    EndRun,
    MarkRows,
    OpenRollout,
    OpenTrainer,
    Prefetch,
    PrepareWeights,
    ReadRows,
    SaveGradients,
    SetTimer,
    StartSamples,
    Suspend,
    VoidRows,
    Work,
)
from flexmarl.core.run_events import (
    AdvantagesMade,
    Counted,
    EffectDone,
    EffectFailed,
    Event,
    FatalReported,
    Result,
    RolloutLost,
    RowsRead,
    SampleChanged,
    StopRequested,
    StoredRun,
    TimerFired,
    TrainerLost,
    TrainerOpened,
)
from flexmarl.core.states import RunStatus
from flexmarl.core.training import Training, TrainingRules
from flexmarl.core.training_rows import RunFailure, SampleFact
from flexmarl.core.version_return import batch_attempt

_BatchWork = (
    AdmitGroups
    | CancelSamples
    | ReadRows
    | ComputeAdvantages
    | CloseGroup
    | CloseSubgraphs
    | CreateMicroBatch
    | MarkRows
    | VoidRows
    | CountVertices
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """Everything of a run's configuration that decisions depend on."""

    num_versions: int
    batch: BatchRules
    training: TrainingRules
    trainers: tuple[str, ...]
    evaluation: EvaluationRules = field(default_factory=EvaluationRules)


@dataclass(slots=True)
class _Rollout:
    """The dispatcher as the core knows it; `epoch` counts its losses."""

    epoch: int = 0
    asked: bool = False
    is_open: bool = False
    active: int | None = None
    activating: bool = False


class RunCore:
    """Decides what a run needs next.

    Args:
        rules: Configuration.
        order: Order of the dataset.
        stored: What the store holds of the run; nothing for a new run.
    """

    def __init__(self, rules: RunRules, order: DatasetOrder, stored: StoredRun) -> None:
        self.version = stored.version
        self.cursor = stored.cursor
        self.batch: BatchGroups | None = None
        self.evaluation: Evaluation | None = None
        self.training = Training(rules.training)
        self.ended: EndRun | None = None
        self._rules = rules
        self._order = order
        self._returned_to = stored.returned_to
        self._watch = FailureWatch(rules.batch.samples_per_group, num_done=stored.version or 0)
        self._idle = IdleWatch(rules.batch.advantage.scope)
        self._rollout = _Rollout()
        self._trainers_asked: set[str] = set()
        self._timers: dict[str, float] = {}
        self._failure: RunFailure | None = None
        self._stopping = False
        self._first_commit_asked = False
        self._subgraphs_asked: set[str] = set()
        self._end: BatchEnd | None = None
        self._in_flight: dict[int, tuple[Work, float]] = {}
        self._sample_heard_at = 0.0
        # Samples are most of the news, and change nothing for the trainers by themselves.
        self._training_changed = True
        self._begin_batch()
        self._begin_evaluation(stored.evaluated)
        restore_batch(stored, self.batch, self.training)

    # What a person sees

    @property
    def stage(self) -> str:
        """Stage of the open batch."""
        if self.ended is not None:
            return "done"
        if self.version is None:
            return "starting"
        if self._end is not None and self._end.busy:
            return "commit"
        if self._rollout.active != self.version:
            return "hand-over"
        if self.batch is not None and self.batch.all_terminal:
            return "training"
        return "rollout"

    def waits(self) -> list[str]:
        """What the run waits for, one line each."""
        lines = [effect.waits for effect, _ in self._in_flight.values()]
        if self.batch is not None and self.num_running:
            lines.append(f"rollout: {self.num_running} open sample(s) of batch {self.batch.number}")
        if self.evaluation is not None and self.evaluation.num_open:
            lines.append(f"rollout: {self.evaluation.num_open} sample(s) of an evaluation")
        lines.extend(f"timer: {name}" for name in self._timers)
        return lines

    @property
    def num_running(self) -> int:
        """Samples of the open batch that have not ended."""
        return 0 if self.batch is None else self.batch.num_samples - self.batch.num_samples_ended

    @property
    def in_flight(self) -> list[tuple[Work, float]]:
        """Effects that have not ended, and when they were asked for; the oldest first."""
        return list(self._in_flight.values())

    @property
    def timers(self) -> Mapping[str, float]:
        """When timers fire, by name."""
        return self._timers

    @property
    def sample_heard_at(self) -> float:
        """When a sample ended or was started last."""
        return self._sample_heard_at

    # What happens

    def handle(self, events: Iterable[Event], *, now: float) -> list[Effect]:
        """Takes in what happened and says what to do; without events, at the start.

        Args:
            events: In the order in which they happened.
            now: Monotonic seconds.
        """
        effects: list[Effect] = []
        for event in events:
            if self.ended is None:
                effects.extend(self._take(event, now))
                self._training_changed |= not isinstance(event, SampleChanged)
        if self.ended is None:
            effects.extend(self._advance(now))
        for effect in effects:
            if not isinstance(effect, SetTimer | EndRun):
                self._in_flight[id(effect)] = (effect, now)
        return effects

    def _take(self, event: Event, now: float) -> Iterator[Effect]:
        match event:
            case EffectDone(effect, result):
                self._in_flight.pop(id(effect), None)
                yield from self._done(effect, result, now)
            case EffectFailed(effect, failure):
                self._in_flight.pop(id(effect), None)
                self._effect_failed(effect, failure, now)
            case SampleChanged(sample):
                self._sample_heard_at = now
                is_evaluated = sample.sample_id.group.batch.evaluation
                concerned = self.evaluation if is_evaluated else self.batch
                if concerned is not None:
                    concerned.sample_changed(sample)
            case RolloutLost():
                self._rollout = _Rollout(epoch=self._rollout.epoch + 1)
            case TrainerLost(trainer):
                self._trainers_asked.discard(trainer)
                self.training.trainer_lost(trainer)
            case FatalReported(failure):
                self._failure = failure
            case TimerFired(name):
                self._timers.pop(name, None)
            case StopRequested(finish_batch):
                self._stopping = True
                if not finish_batch:
                    yield self._finish(RunStatus.STOPPED, "a user stopped the run")
            case _:
                assert_never(event)

    def _done(self, effect: Work, result: Result, now: float) -> Iterator[Effect]:
        match effect:
            case OpenRollout(epoch=epoch):
                self._rollout.is_open = self._rollout.is_open or epoch == self._rollout.epoch
            case ActivateVersion(version=version, epoch=epoch):
                if epoch == self._rollout.epoch:
                    self._rollout.active = version
                    self._rollout.activating = False
                    yield from self._start_all_open()
            case OpenTrainer(trainer=trainer):
                assert isinstance(result, TrainerOpened), "OpenTrainer ends with its slots"
                self.training.trainer_opened(trainer, result.slots)
                if self.training.trainers >= set(self._rules.trainers):
                    self.training.trainers_complete()
            case Bind() | Compute() | SaveGradients() | Apply() | Suspend():
                current = self.training.done(effect, result, now=now)
                if not current and not isinstance(effect, Suspend):
                    # It came to a trainer that had been given up, and is there again: nothing else
                    # would free what it holds.
                    yield Suspend(
                        policy=effect.policy,
                        binding=effect.binding,
                        trainer=effect.trainer,
                        reason="the binding was given up while this was under way",
                    )
                elif current and isinstance(effect, Apply):
                    yield PrepareWeights(
                        version=effect.batch + 1, policy=effect.policy, reason="its update is made"
                    )
            case Commit():
                self.version = effect.version
                self.cursor = effect.cursor
                self._begin_batch()
                self._begin_evaluation()
            case StartSamples():
                self._sample_heard_at = now
            case Prefetch() | PrepareWeights():
                pass
            case AdmitGroups(groups=groups) if is_evaluation(groups[0].group_id):
                assert self.evaluation is not None, "it asked for them"
                self.evaluation.admitted()
            case ReadRows(group_id=group_id) if is_evaluation(group_id):
                assert self.evaluation is not None, "it asked for them"
                assert isinstance(result, RowsRead), "ReadRows ends with rows"
                self.evaluation.rows_read(group_id, result.rows)
            case _:
                self._batch_done(effect, result)

    def _batch_done(self, effect: _BatchWork, result: Result) -> None:
        batch, end = self.batch, self._end
        assert batch is not None, "these effects belong to a batch"
        assert end is not None, "a batch has an end"
        match effect:
            case AdmitGroups(groups=groups):
                batch.admitted(groups)
            case CancelSamples(samples=samples):
                batch.cut(samples)
            case ReadRows(group_id=group_id):
                assert isinstance(result, RowsRead), "ReadRows ends with rows"
                batch.rows_read(group_id, result.rows)
            case ComputeAdvantages(group_id=group_id):
                assert isinstance(result, AdvantagesMade), "it ends with advantages"
                batch.advantages_made(group_id, result.scopes)
            case CloseGroup():
                for row in batch.closed(effect):
                    queue = self.training.policies[row.policy].queue
                    queue.add((row,), group_ordinal=batch.groups[effect.group_id].spec.ordinal)
            case CloseSubgraphs(policies=policies):
                for name in policies:
                    self.training.policies[name].subgraph_closed = True
            case CreateMicroBatch():
                self.training.policies[effect.policy].created(effect.micro_batch_id)
            case MarkRows():
                self.training.policies[effect.policy].marked(effect.micro_batch_id)
            case VoidRows():
                end.voided()
            case CountVertices():
                assert isinstance(result, Counted), "CountVertices ends with the open rows"
                end.counted(result.open_rows, result.voided)
            case _:
                assert_never(effect)

    def _effect_failed(self, effect: Work, failure: RunFailure, now: float) -> None:
        match effect:
            case Bind() | Compute() | SaveGradients() | Apply() | Suspend():
                self.training.failed(effect, failure, now=now)
            case Prefetch() | PrepareWeights():
                pass  # they only save time: the binding loads, the activation brings the weights
            case ComputeAdvantages(epoch=epoch) if epoch != self._rollout.epoch:
                assert self.batch is not None, "its group is open"
                self.batch.ask_again(effect.group_id, effect.scopes)
            case (
                OpenRollout(epoch=epoch) | ActivateVersion(epoch=epoch) | StartSamples(epoch=epoch)
            ):
                if epoch == self._rollout.epoch:
                    self._failure = failure
            case _:
                self._failure = failure

    # What is due

    def _advance(self, now: float) -> Iterator[Effect]:
        yield from self._open_services()
        if self.version is None:
            yield from self._first_commit()
        else:
            yield from self._activate()
            yield from self._batch_due()
            yield from self._evaluation_due()
        if self._training_changed:
            self._training_changed = False
            share = 0.0 if self.batch is None else self.batch.share_terminal
            due = self.training.due(version=self.version, now=now, share_closed=share)
            yield from self._new_timers(due)
        if self._end is not None and self.batch is not None and self._evaluated:
            assert self.version is not None, "a batch is sampled at a version"
            cursor = self._order.advance(self.cursor, self.batch.num_admitted)
            yield from self._end.due(version=self.version, cursor=cursor)
        yield from self._finish_if_due()

    def _open_services(self) -> Iterator[Effect]:
        if not self._rollout.asked:
            self._rollout.asked = True
            reason = "the dispatcher was started anew" if self._rollout.epoch else "the run begins"
            yield OpenRollout(epoch=self._rollout.epoch, reason=reason)
        for trainer in self._rules.trainers:
            if trainer not in self._trainers_asked:
                self._trainers_asked.add(trainer)
                yield OpenTrainer(trainer=trainer, reason="its slots are not known")

    def _first_commit(self) -> Iterator[Effect]:
        if self._stopping:
            yield self._finish(RunStatus.STOPPED, "a user stopped the run before its first version")
        elif self.training.all_have_state and not self._first_commit_asked:
            self._first_commit_asked = True
            yield Commit(
                version=0,
                expected_version=None,
                stepped=(),
                cursor=self.cursor,
                reason="set 0 of every policy exists",
            )

    def _activate(self) -> Iterator[Effect]:
        rollout, version = self._rollout, self.version
        # One at a time: two under way could arrive in the wrong order.
        due = rollout.is_open and not rollout.activating and rollout.active != version
        if version is not None and due and self.training.off_devices:
            rollout.activating = True
            yield ActivateVersion(version=version, epoch=rollout.epoch, reason="it is committed")

    def _batch_due(self) -> Iterator[Effect]:
        batch = self.batch
        if batch is None:
            return
        yield from batch.due()
        if self._rollout.is_open:
            for group_id, scopes in batch.take_asks().items():
                yield ComputeAdvantages(
                    batch=batch.number,
                    epoch=self._rollout.epoch,
                    group_id=group_id,
                    scopes=scopes,
                    reason="its rows are known",
                )
        if self._rollout.active == self.version:
            yield from self._start(batch.take_startable(), "they are due")
        asked = self._subgraphs_asked
        left: tuple[str, ...] = ()
        if batch.all_terminal or self._rules.training.overlaps:
            names = (p.name for p in self.training.trained if p.name not in asked)
            left = tuple(name for name in names if batch.is_left(name))
        if left:
            asked.update(left)
            reason = "no group is open" if batch.all_terminal else "no open group can reach it"
            yield CloseSubgraphs(batch=batch.number, policies=left, reason=reason)

    def _evaluation_due(self) -> Iterator[Effect]:
        if self.evaluation is not None and self._rollout.active == self.version:
            yield from self.evaluation.due()
            yield from self._start(self.evaluation.take_startable(), "the version is evaluated")

    @property
    def _evaluated(self) -> bool:
        """Whether the version may be left, as far as its evaluation goes."""
        return self.evaluation is None or self.evaluation.done

    def _start_all_open(self) -> Iterator[Effect]:
        if self._rollout.active != self.version:
            return
        if self.batch is not None:
            self.batch.take_startable()
            yield from self._start(list(self.batch.open_samples()), "the version is active")
        if self.evaluation is not None and self.evaluation.is_admitted:
            self.evaluation.take_startable()
            yield from self._start(self.evaluation.open_samples(), "the version is active")

    def _start(self, samples: list[SampleId], reason: str) -> Iterator[Effect]:
        if samples and self.version is not None:
            yield StartSamples(
                batch=self.version,
                epoch=self._rollout.epoch,
                samples=tuple(samples),
                reason=reason,
            )

    def _begin_batch(self) -> None:
        self.batch = self._end = None
        if self.version is None or self._is_last or self._stopping:
            return
        start = self.cursor
        self._subgraphs_asked.clear()
        self.batch = BatchGroups(
            BatchId(self.version, batch_attempt(self._returned_to, self.version)),
            self._rules.batch,
            query_at=lambda ordinal: self._order.row_at(self._order.advance(start, ordinal)),
            watch=self._watch,
            max_groups=self._order.left(start),
        )
        self._end = BatchEnd(self.batch, self.training, self._idle)
        self.training.begin_batch(self.batch.batch)

    @property
    def _is_last(self) -> bool:
        """Whether no batch follows the version."""
        assert self.version is not None, "version 0 is committed"
        return self.version >= self._rules.num_versions or self._order.left(self.cursor) == 0

    def _begin_evaluation(self, stored: Iterable[SampleFact] = ()) -> None:
        self.evaluation = None
        rules, version = self._rules.evaluation, self.version
        if version is not None and rules.is_due(version, last=self.batch is None):
            attempt = batch_attempt(self._returned_to, version)
            self.evaluation = Evaluation(version, rules, stored, attempt=attempt)

    def _new_timers(self, effects: Iterable[Effect]) -> Iterator[Effect]:
        for effect in effects:
            if isinstance(effect, SetTimer):
                if self._timers.get(effect.name) == effect.at:
                    continue
                self._timers[effect.name] = effect.at
            yield effect

    def _finish_if_due(self) -> Iterator[Effect]:
        parts = (self.batch, self._end, self.training)
        failures = [self._failure, *(part.failure for part in parts if part is not None)]
        failure = next((failure for failure in failures if failure is not None), None)
        if failure is not None:
            yield self._finish(RunStatus.FAILED, failure.message, failure)
        elif self.batch is None and self.version is not None:
            if self._is_last:
                if self._rollout.active == self.version and self._evaluated:
                    yield self._finish(RunStatus.FINISHED, f"version {self.version} is committed")
            else:  # it goes without a batch only when it shall stop
                yield self._finish(RunStatus.STOPPED, "a user stopped the run after its batch")

    def _finish(self, status: RunStatus, reason: str, failure: RunFailure | None = None) -> EndRun:
        self.ended = EndRun(status=status, failure=failure, reason=reason)
        return self.ended
