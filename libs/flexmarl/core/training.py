"""All policies of a run, training side: which operation runs next on which binding.

A policy runs one operation at a time. What ends a binding is a suspension, or a failure: then what
was not saved is handed out again under the next binding, and the number of failures in a row is
bounded, so that a broken trainer ends the run instead of stalling it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flexmarl.core.allocation import Allocation, BindSlots, Demand, allocate
from flexmarl.core.ids import BatchId
from flexmarl.core.policy_training import (
    Binding,
    OperationKind,
    PolicyRules,
    PolicyTraining,
    RecordStage,
)
from flexmarl.core.run_effects import (
    Apply,
    Bind,
    Compute,
    CreateMicroBatch,
    MarkRows,
    SaveGradients,
    SetTimer,
    Suspend,
    TrainerWork,
)
from flexmarl.core.run_events import Computed, Result, StateSaved
from flexmarl.core.training_rows import RunFailure

MAX_FAILURES = 8
"""Operations of one policy that may fail in a row; then the run fails with the last reason."""

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0

FATAL_REASONS = frozenset(
    {"MODEL_INVALID", "UNKNOWN_CONFIG_KEY", "NOT_BUILT", "DISK_FULL", "UNAVAILABLE"}
)
"""Failures that another try cannot mend; an absent trainer was waited for by the driver already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRules:
    """Policies by name, and how slots are shared."""

    policies: Mapping[str, PolicyRules]
    min_residence_s: float = 0.0
    ledger_every_s: float = 30.0


class Training:
    """The training side of a run."""

    def __init__(self, rules: TrainingRules) -> None:
        self.policies = {
            name: PolicyTraining(name, policy) for name, policy in sorted(rules.policies.items())
        }
        self.failure: RunFailure | None = None
        self._rules = rules
        self._trainers: dict[str, tuple[str, ...]] = {}
        self._bindings = 0
        self._batch = BatchId(0)
        self._begun = False

    # What is known

    @property
    def trained(self) -> list[PolicyTraining]:
        """The trained policies, by name."""
        return [policy for policy in self.policies.values() if policy.rules.trained]

    @property
    def all_have_state(self) -> bool:
        """Whether every policy's set 0 exists."""
        return all(policy.has_state for policy in self.policies.values())

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do in the batch, for any policy."""
        return all(policy.settled for policy in self.policies.values())

    @property
    def stepped(self) -> tuple[str, ...]:
        """Policies whose update of the batch is made."""
        return tuple(policy.name for policy in self.trained if policy.applied)

    @property
    def consumed(self) -> tuple[str, ...]:
        """Micro-batches in the updates of the batch."""
        return tuple(i for policy in self.trained if policy.applied for i in policy.in_sum)

    # What happens

    def begin_batch(self, batch: BatchId) -> None:
        """Go on to a batch."""
        self._batch = batch
        self._begun = True
        for policy in self.policies.values():
            policy.begin_batch(batch)

    def trainer_opened(self, trainer: str, slots: tuple[str, ...]) -> None:
        """A trainer's slots can be used."""
        self._trainers[trainer] = slots

    def trainer_lost(self, trainer: str) -> None:
        """A trainer's slots and bindings are gone."""
        self._trainers.pop(trainer, None)
        for policy in self.policies.values():
            if policy.binding is not None and policy.binding.trainer == trainer:
                policy.unbind()

    def done(self, effect: TrainerWork, result: Result, *, now: float) -> bool:
        """An operation ended; False when its binding is an older one."""
        policy = self.policies[effect.policy]
        binding = policy.binding
        if binding is None or binding.number != effect.binding:
            return False
        binding.operation = None
        policy.failures = 0
        if isinstance(effect, Compute):
            non_finite = isinstance(result, Computed) and result.non_finite
            policy.computed(effect.micro_batch_id, non_finite=non_finite, now=now)
            return True
        assert isinstance(result, StateSaved), "the other operations end with a saved state"
        if isinstance(effect, Bind):
            binding.since = now
        policy.adopt(result.state)
        if isinstance(effect, Suspend):
            policy.unbind()
        return True

    def failed(self, effect: TrainerWork, failure: RunFailure, *, now: float) -> None:
        """An operation failed: the binding is not to be trusted any more."""
        policy = self.policies[effect.policy]
        binding = policy.binding
        if binding is None or binding.number != effect.binding:
            return
        policy.unbind()
        policy.failures += 1
        delay_s = min(FIRST_RETRY_S * 2 ** (policy.failures - 1), MAX_RETRY_S)
        policy.retry_at = now + delay_s
        if failure.reason in FATAL_REASONS or policy.failures >= MAX_FAILURES:
            self.failure = RunFailure(
                reason=failure.reason,
                message=f"policy {policy.name}: {failure.message}",
                metadata={**failure.metadata, "policy": policy.name},
            )

    def due(
        self, *, version: int | None, now: float
    ) -> Iterator[CreateMicroBatch | MarkRows | TrainerWork | SetTimer]:
        """What is to be done now."""
        for policy in self.policies.values():
            yield from policy.form()
            yield from policy.marks_due()
        # First who has to leave: a policy that begins its next operation cannot.
        yield from self._allocate(version=version, now=now)
        for policy in self.policies.values():
            yield from self._next_operation(policy, now=now)

    # How it is done

    def _next_operation(
        self, policy: PolicyTraining, *, now: float
    ) -> Iterator[TrainerWork | SetTimer]:
        binding = policy.binding
        if binding is None or binding.operation is not None:
            return
        name, number, trainer = policy.name, binding.number, binding.trainer
        save_at = None
        if policy.unsaved_since is not None:
            save_at = policy.unsaved_since + self._rules.ledger_every_s
        if policy.apply_due:
            binding.operation = OperationKind.APPLY
            yield Apply(
                policy=name,
                binding=number,
                trainer=trainer,
                batch=self._batch.batch,
                micro_batch_ids=policy.in_sum,
                reason="its subgraph is closed and every record is in the sum",
            )
        elif save_at is not None and save_at <= now:
            binding.operation = OperationKind.SAVE
            yield SaveGradients(
                policy=name,
                binding=number,
                trainer=trainer,
                reason="gradients are unsaved",
            )
        elif policy.ready:
            record = policy.ready[0]
            record.stage = RecordStage.COMPUTING
            binding.operation = OperationKind.COMPUTE
            yield Compute(
                policy=name,
                binding=number,
                trainer=trainer,
                batch=self._batch.batch,
                micro_batch_id=record.micro_batch_id,
                reason=f"{len(policy.ready) + 1} record(s) ready",
            )
        elif not policy.rules.trained:
            yield self._suspend(policy, "its weights are published and never change")
        elif save_at is not None:
            yield SetTimer(name=f"ledger/{name}", at=save_at, reason="gradients are unsaved")

    def _allocate(self, *, version: int | None, now: float) -> Iterator[TrainerWork | SetTimer]:
        decision = self._decide(now=now)
        for action in decision.actions:
            policy = self.policies[action.policy]
            if not isinstance(action, BindSlots):
                yield self._suspend(policy, action.reason)
                continue
            self._bindings += 1
            policy.retry_at = None
            policy.last_trainer = action.trainer
            policy.binding = Binding(
                self._bindings, action.trainer, action.slots, now, OperationKind.BIND
            )
            yield Bind(
                policy=policy.name,
                binding=self._bindings,
                trainer=action.trainer,
                slots=action.slots,
                version=version,
                reason=action.reason,
            )
        waits = [p.retry_at for p in self.policies.values() if p.retry_at and p.retry_at > now]
        if decision.look_again_at is not None:
            waits.append(decision.look_again_at)
        if waits:
            yield SetTimer(name="allocation", at=min(waits), reason="slots may be given anew")

    def _decide(self, *, now: float) -> Allocation:
        return allocate(
            [self._demand(policy, now=now) for policy in self.policies.values()],
            trainers=self._trainers,
            min_residence_s=self._rules.min_residence_s,
            now=now,
        )

    def _demand(self, policy: PolicyTraining, *, now: float) -> Demand:
        binding = policy.binding
        work = policy.work if policy.has_state else 1.0
        if policy.retry_at is not None and policy.retry_at > now:
            work = 0.0
        operation = None if binding is None else binding.operation
        return Demand(
            policy=policy.name,
            world_size=policy.rules.world_size,
            work=work,
            expects=self._begun and policy.rules.trained and not policy.summed,
            trainer=None if binding is None else binding.trainer,
            slots=() if binding is None else binding.slots,
            since=0.0 if binding is None else binding.since,
            busy=operation is not None,
            leaving=operation is OperationKind.SUSPEND,
            finishing=policy.apply_due,
            last_trainer=policy.last_trainer,
        )

    def _suspend(self, policy: PolicyTraining, reason: str) -> Suspend:
        assert policy.binding is not None, "only a bound policy can be suspended"
        policy.binding.operation = OperationKind.SUSPEND
        return Suspend(
            policy=policy.name,
            binding=policy.binding.number,
            trainer=policy.binding.trainer,
            reason=reason,
        )
