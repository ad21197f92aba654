"""All policies of a run, training side: which operation runs next on which binding.

A policy runs one operation at a time. What ends a binding is a suspension, or a failure: then what
was not saved is handed out again under the next binding, and the number of failures in a row is
bounded, so that a broken trainer ends the run instead of stalling it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from statistics import fmean

from flexmarl.core.allocation import Allocation, BindSlots, allocate
from flexmarl.core.demands import Demand
from flexmarl.core.foresight import foresee
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
    Prefetch,
    SaveGradients,
    SetTimer,
    Suspend,
    TrainerWork,
)
from flexmarl.core.run_events import Computed, Result, StateSaved
from flexmarl.core.slot_places import Places
from flexmarl.core.training_estimates import DEFAULT_RATE
from flexmarl.core.training_rows import RunFailure

MAX_FAILURES = 8
"""Operations of one policy that may fail in a row; then the run fails with the last reason."""

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0

FATAL_REASONS = frozenset(
    {
        "MODEL_INVALID",
        "UNKNOWN_CONFIG_KEY",
        "NOT_BUILT",
        "DISK_FULL",
        "UNAVAILABLE",
        "LOSS_RAISED",
        "NON_FINITE",
        "WORKFLOW_IMPORT_FAILED",
    }
)
"""Failures that another try cannot mend; an absent trainer was waited for by the driver already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRules:
    """Policies by name, and how slots are shared.

    Attributes:
        policies: Policies.
        min_residence_s: Time that a policy keeps its slots while it has or expects work.
        ledger_every_s: Longest time that computed gradients stay unsaved.
        prefetch_from_s: State that a binding loads in less is not worth a call ahead of it.
        overlaps: Groups are trained as they close; else when the whole batch is there.
        static: Each trained policy has slots of its own for the whole run.
        colocated: Slots and instances are the same devices in turn: nothing stays bound while
            samples run.
    """

    policies: Mapping[str, PolicyRules]
    min_residence_s: float = 0.0
    ledger_every_s: float = 30.0
    prefetch_from_s: float = 0.2
    overlaps: bool = True
    static: bool = False
    colocated: bool = False


class Training:
    """The training side of a run."""

    def __init__(self, rules: TrainingRules) -> None:
        self.policies = {
            name: PolicyTraining(name, policy) for name, policy in sorted(rules.policies.items())
        }
        self.failure: RunFailure | None = None
        self._rules = rules
        self._trainers: dict[str, tuple[str, ...]] = {}
        self._largest: int | None = None
        self._places = Places({p.name: p.rules.world_size for p in self.trained})
        self._bindings = 0
        self._batch = BatchId(0)
        self._begun = False
        self._share_closed = 0.0

    # What is known

    @property
    def trained(self) -> list[PolicyTraining]:
        """The trained policies, by name."""
        return [policy for policy in self.policies.values() if policy.rules.trained]

    @property
    def trainers(self) -> Set[str]:
        """Trainers whose slots can be used."""
        return self._trainers.keys()

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

    @property
    def off_devices(self) -> bool:
        """Whether samples may run, as far as devices go: none of theirs is bound here."""
        bound = any(policy.binding is not None for policy in self.policies.values())
        return not (self._rules.colocated and bound)

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

    def trainers_complete(self) -> None:
        """No further trainer will come: who needs more slots than there are would wait for ever."""
        sizes = {name: len(slots) for name, slots in sorted(self._trainers.items())}
        self._largest = max(sizes.values())
        asked = [
            (
                f"policies.{name}.trainer.world_size = {policy.rules.world_size}",
                policy.rules.world_size,
            )
            for name, policy in self.policies.items()
        ]
        if self._rules.static:
            self._places.find(self._trainers)
            in_sum = sum(policy.rules.world_size for policy in self.trained)
            asked.append((f'pipeline.allocation = "static", {in_sum} slots in sum', in_sum))
        for what, needed in asked:
            if needed > sum(sizes.values()):
                had = ", ".join(f"{name} has {size}" for name, size in sizes.items())
                self.failure = RunFailure(
                    reason="INVALID_ARGUMENT",
                    message=f"{what}: the trainers do not have as many slots ({had})",
                )

    def trainer_lost(self, trainer: str) -> None:
        """A trainer's slots are gone, and every binding with a rank there."""
        self._trainers.pop(trainer, None)
        for policy in self.policies.values():
            binding = policy.binding
            if binding is not None and any(place.trainer == trainer for place in binding.places):
                policy.unbind()

    def done(self, effect: TrainerWork, result: Result, *, now: float) -> bool:
        """An operation ended; False when its binding is an older one."""
        policy = self.policies[effect.policy]
        binding = policy.binding
        if binding is None or binding.number != effect.binding:
            return False
        took_s = now - binding.operation_since
        binding.operation = None
        binding.idle_since = now
        if not isinstance(effect, Bind):
            policy.failures = 0  # a binding alone gets nothing done; what follows may always fail
        if isinstance(effect, Compute):
            num_tokens = policy.records[effect.micro_batch_id].num_tokens
            policy.estimates.computed(num_tokens, took_s=took_s, units=binding.num_slots)
            non_finite = isinstance(result, Computed) and result.non_finite
            policy.computed(effect.micro_batch_id, non_finite=non_finite, now=now)
            return True
        assert isinstance(result, StateSaved), "the other operations end with a saved state"
        if isinstance(effect, Bind):
            binding.since = now
            policy.estimates.bound(took_s)
        policy.adopt(result.state)
        if isinstance(effect, Suspend):
            policy.unbind()
            policy.estimates.suspended(took_s)
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
        self, *, version: int | None, now: float, share_closed: float = 0.0
    ) -> Iterator[CreateMicroBatch | MarkRows | TrainerWork | Prefetch | SetTimer]:
        """What is to be done now.

        Args:
            version: Committed version; None before the first.
            now: Monotonic seconds.
            share_closed: Share of the batch's groups that have ended.
        """
        self._share_closed = share_closed
        for policy in self.policies.values():
            if self._rules.overlaps or policy.subgraph_closed:
                yield from policy.form()
            yield from policy.marks_due()
            policy.note_work(now=now)
        # First who has to leave: a policy that begins its next operation cannot.
        yield from self._allocate(version=version, now=now)
        for policy in self.policies.values():
            yield from self._next_operation(policy, now=now)
        yield from self._prefetch(now=now)

    # How it is done

    def _prefetch(self, *, now: float) -> Iterator[Prefetch]:
        """Has the state of the next policy loaded beside what its slots compute now."""
        if not any(self._is_worth_a_hint(policy) for policy in self.policies.values()):
            return
        following = foresee(self._demands(now=now), trainers=self._trainers)
        if following is None or self._swaps(following):
            return
        policy = self.policies[following.policy]
        if self._is_worth_a_hint(policy):
            policy.sent_ahead()
            yield Prefetch(
                policy=following.policy,
                trainer=following.trainer,
                slots=following.slots,
                reason=following.reason,
            )

    def _is_worth_a_hint(self, policy: PolicyTraining) -> bool:
        """Whether its state takes long to load, lies nowhere yet, and was not sent ahead."""
        takes_long = policy.estimates.bind_s >= self._rules.prefetch_from_s
        return takes_long and policy.binding is None and not policy.is_ahead

    def _swaps(self, following: BindSlots) -> bool:
        """Whether one of these slots is changing hands: loading would be in its way."""
        bindings = [policy.binding for policy in self.policies.values()]
        return any(
            binding.operation in (OperationKind.BIND, OperationKind.SUSPEND)
            and place.trainer == following.trainer
            and not set(following.slots).isdisjoint(place.slots)
            for binding in bindings
            if binding is not None
            for place in binding.places
        )

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
            binding.begin(OperationKind.APPLY, now=now)
            yield Apply(
                policy=name,
                binding=number,
                trainer=trainer,
                batch=self._batch.batch,
                micro_batch_ids=policy.in_sum,
                reason="its subgraph is closed and every record is in the sum",
            )
        elif save_at is not None and save_at <= now:
            binding.begin(OperationKind.SAVE, now=now)
            yield SaveGradients(
                policy=name,
                binding=number,
                trainer=trainer,
                reason="gradients are unsaved",
            )
        elif policy.ready:
            record = policy.ready[0]
            record.stage = RecordStage.COMPUTING
            binding.begin(OperationKind.COMPUTE, now=now)
            yield Compute(
                policy=name,
                binding=number,
                trainer=trainer,
                batch=self._batch.batch,
                micro_batch_id=record.micro_batch_id,
                reason=f"{len(policy.ready) + 1} record(s) ready",
            )
        elif not policy.rules.trained:
            yield self._suspend(policy, "its weights are published and never change", now=now)
        elif self._rules.colocated and (policy.settled or not policy.subgraph_closed):
            yield self._suspend(policy, "samples run on the same devices", now=now)
        elif save_at is not None:
            yield SetTimer(name=f"ledger/{name}", at=save_at, reason="gradients are unsaved")

    def _allocate(self, *, version: int | None, now: float) -> Iterator[TrainerWork | SetTimer]:
        decision = self._decide(now=now)
        for action in decision.actions:
            policy = self.policies[action.policy]
            if not isinstance(action, BindSlots):
                yield self._suspend(policy, action.reason, now=now)
                continue
            self._bindings += 1
            policy.retry_at = None
            policy.last_trainer = action.trainer
            policy.binding = Binding(
                number=self._bindings,
                trainer=action.trainer,
                slots=action.slots,
                beyond=action.beyond,
                since=now,
                operation=OperationKind.BIND,
                operation_since=now,
            )
            yield Bind(
                policy=policy.name,
                binding=self._bindings,
                trainer=action.trainer,
                slots=action.slots,
                beyond=action.beyond,
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
            self._demands(now=now),
            trainers=self._trainers,
            min_residence_s=self._rules.min_residence_s,
            now=now,
            ahead=not (self._rules.colocated or self._rules.static),
        )

    def _demands(self, *, now: float) -> list[Demand]:
        known = [p.estimates.rate for p in self.policies.values() if p.estimates.rate is not None]
        rate = fmean(known) if known else DEFAULT_RATE
        return [self._demand(policy, rate=rate, now=now) for policy in self.policies.values()]

    def _demand(self, policy: PolicyTraining, *, rate: float, now: float) -> Demand:
        """One policy's; `rate` is that of the others, for want of its own."""
        binding = policy.binding
        retries = policy.retry_at is not None and policy.retry_at > now
        work = 0.0 if retries else policy.work if policy.has_state else 1.0
        if self._rules.static and policy.rules.trained and self._largest is None:
            work = 0.0  # it would take slots that are to be another one's for the whole run
        operation = None if binding is None else binding.operation
        return Demand(
            policy=policy.name,
            world_size=policy.rules.world_size,
            max_world_size=policy.rules.max_world_size,
            spans=self._largest is not None and policy.rules.world_size > self._largest,
            work=work,
            remaining=policy.remaining(share_closed=self._share_closed),
            rate=policy.estimates.rate or rate,
            swap_s=policy.estimates.swap_s,
            expects=self._begun and policy.rules.trained and not (policy.summed or retries),
            trainer=None if binding is None else binding.trainer,
            slots=() if binding is None else binding.slots,
            beyond=() if binding is None else binding.beyond,
            since=0.0 if binding is None else binding.since,
            idle_since=0.0 if binding is None else binding.idle_since,
            busy=operation is not None,
            leaving=operation is OperationKind.SUSPEND,
            finishing=policy.apply_due,
            last_trainer=policy.last_trainer,
            places=self._places.of(policy.name),
        )

    def _suspend(self, policy: PolicyTraining, reason: str, *, now: float) -> Suspend:
        assert policy.binding is not None, "only a bound policy can be suspended"
        policy.binding.begin(OperationKind.SUSPEND, now=now)
        return Suspend(
            policy=policy.name,
            binding=policy.binding.number,
            trainer=policy.binding.trainer,
            reason=reason,
        )
