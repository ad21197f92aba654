"""One batch, rollout side: its groups, their samples, and how each group ends.

    admit -> samples run -> every sample terminal -> rows read -> advantages -> closed or dropped
                  |  ^                                                             |
                  refill                                      dropped: next query replaces it

`BatchGroups` says what is due; it never waits by itself. A group leaves a stage only by an event:
the store acknowledged it (admit, read, close) or told that a sample ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import assert_never

from flexmarl.core.advantages import Scopes
from flexmarl.core.batch_rules import BatchRules
from flexmarl.core.chains import folded
from flexmarl.core.closure import (
    CancelRest,
    Close,
    Drop,
    Fail,
    FailureWatch,
    Refill,
    Wait,
    decide_group,
)
from flexmarl.core.group_admission import GroupAdmission
from flexmarl.core.group_closing import GroupClosing
from flexmarl.core.group_state import GroupStage, GroupState
from flexmarl.core.ids import BatchId, GroupId, SampleId
from flexmarl.core.reach import group_reaches
from flexmarl.core.run_effects import AdmitGroups, CancelSamples, CloseGroup, GroupSpec, ReadRows
from flexmarl.core.run_events import StoredGroup
from flexmarl.core.states import GroupStatus, SampleStatus, VoidReason
from flexmarl.core.training_rows import Row, RunFailure, SampleFact


class BatchGroups:
    """The groups of one batch attempt.

    Args:
        batch: Batch and attempt.
        rules: Sizes and policies.
        query_at: Dataset row of the group with an ordinal, replacements counted on.
        watch: Failure watch of the whole run.
        max_groups: Queries that the dataset has left, replacements included; None: no end.
    """

    def __init__(
        self,
        batch: BatchId,
        rules: BatchRules,
        *,
        query_at: Callable[[int], int],
        watch: FailureWatch,
        max_groups: int | None = None,
    ) -> None:
        self.batch = batch
        self.groups: dict[str, GroupState] = {}
        self.failure: RunFailure | None = None
        self._rules = rules
        self._watch = watch
        self._admission = GroupAdmission(
            batch,
            self.groups,
            num_groups=rules.num_groups,
            rules=rules.closure,
            query_at=query_at,
            max_groups=max_groups,
        )
        self._closing = GroupClosing(batch, self.groups, rules)
        self._num_terminal = 0
        self._due: dict[str, None] = {}
        self._to_start: list[SampleId] = []
        self._left: set[str] = set()
        self._reaching: dict[str, str] = {}

    # What is known

    @property
    def number(self) -> int:
        """Number of the batch."""
        return self.batch.batch

    @property
    def num_admitted(self) -> int:
        """Queries taken so far, replacements included: how far the cursor moves."""
        return self._admission.num_admitted

    @property
    def num_terminal(self) -> int:
        """Groups that are closed or dropped."""
        return self._num_terminal

    @property
    def share_terminal(self) -> float:
        """The same as a share of all groups so far."""
        return self._num_terminal / max(len(self.groups), 1)

    @property
    def all_terminal(self) -> bool:
        """Whether no group is open, refillable or replaceable."""
        ended = 0 < len(self.groups) == self._num_terminal
        return ended and not self._due and not self._admission.is_replacing

    def open_samples(self) -> Iterator[SampleId]:
        """Sample attempts that shall run, oldest group first."""
        for group in self.groups.values():
            if group.stage is not GroupStage.OPEN or group.cancelled:
                continue
            for ordinal, status in group.current.items():
                if status is SampleStatus.OPEN:
                    yield group.sample_id(ordinal)

    @property
    def num_samples(self) -> int:
        """Samples of the batch so far, refills included."""
        return sum(len(group.current) for group in self.groups.values())

    @property
    def num_samples_ended(self) -> int:
        """Samples that ended."""
        return self.num_samples - sum(
            status is SampleStatus.OPEN
            for group in self.groups.values()
            for status in group.current.values()
        )

    @property
    def sample_failure(self) -> RunFailure | None:
        """Why one of its samples failed, the first that says why; None when none did."""
        facts = (fact for group in self.groups.values() for fact in group.samples.values())
        return next((fact.failure for fact in facts if fact.failure is not None), None)

    def is_left(self, policy: str) -> bool:
        """Whether no row of a policy can come any more, and none waits for its group's end."""
        if policy not in self._left or self._admission.is_replacing:
            return self.all_terminal
        # Asked after every event: as long as the group that stood against it does, nothing changes.
        known = self.groups.get(self._reaching.get(policy, ""))
        if known is not None and self._reaches(known, policy):
            return False
        reaching = next((g for g in self.groups.values() if self._reaches(g, policy)), None)
        if reaching is None:
            return True
        self._reaching[policy] = reaching.spec.group_id
        return False

    def leftover_reason(self, row: Row) -> VoidReason:
        """Why a row that came after its group had ended is not trained on."""
        group = self.groups.get(str(SampleId.parse(row.sample_id).group))
        if group is None:
            return VoidReason.GROUP_DROPPED
        reason = self._closing.dead_reason(group, row.sample_id)
        if reason is not None:
            return reason
        # It finished behind the back of a workflow that had returned already.
        dropped = group.status is GroupStatus.DROPPED
        return VoidReason.GROUP_DROPPED if dropped else VoidReason.REDUNDANT

    # What happens

    def admitted(self, specs: Iterable[GroupSpec]) -> None:
        """The store has the groups."""
        self._admission.acknowledged()
        for spec in specs:
            group = self.groups[spec.group_id]
            group.stage = GroupStage.OPEN
            self._to_start.extend(group.sample_id(ordinal) for ordinal in group.current)

    def restore(
        self,
        stored: Sequence[StoredGroup],
        samples: Iterable[SampleFact],
        *,
        updated: Collection[str] = (),
    ) -> None:
        """Takes up what the store has of the batch.

        Args:
            stored: Its groups.
            samples: Its sample attempts.
            updated: Policies whose update is made: rows that groups bring in place of lost ones
                come too late for it.
        """
        for item in sorted(stored, key=lambda item: item.spec.ordinal):
            group = self._add(item.spec, GroupStage.OPEN)
            if item.lost:
                group.lost = True
                group.current.clear()  # what its samples were went with it
            if item.status is not GroupStatus.OPEN:
                self._end(group, item.status, released=len(item.claimable))
                group.rows = item.rows
        for sample in samples:
            self.sample_changed(sample)
        for group in self.groups.values():
            self._due[group.spec.group_id] = None
        self._closing.restored(updated)
        self._admission.restored()

    def sample_changed(self, fact: SampleFact) -> None:
        """The store told of a sample; news of other batches or from before is left aside."""
        sample_id, text = fact.sample_id, str(fact.sample_id)
        group = self.groups.get(str(sample_id.group))
        if group is None or text in group.samples:
            return
        if fact.status is SampleStatus.OPEN:
            if fact.left:
                group.leaving[text] = fact
                self._left |= fact.left
            return
        group.samples[text] = fact
        ordinal, attempt = sample_id.ordinal, sample_id.attempt
        if attempt >= group.attempts.get(ordinal, 0):
            group.attempts[ordinal] = attempt
            group.current[ordinal] = fact.status
            if fact.status is SampleStatus.SUPERSEDED and not group.cancelled:
                self._to_start.extend(group.begin((ordinal,), attempt=attempt + 1))
        self._due[group.spec.group_id] = None
        failure = fact.failure or RunFailure(
            reason="INTERNAL", message=f"sample {sample_id} ended as {fact.status.value}"
        )
        counted = fact.status in (SampleStatus.DONE, SampleStatus.FAILED)
        failed = fact.status is SampleStatus.FAILED
        if counted and self._watch.is_fatal(failed=failed, reason=failure.reason):
            self.failure = failure

    def cut(self, samples: Iterable[SampleId]) -> None:
        """The dispatcher cut the samples, or never knew them: it will not tell of them any more."""
        for sample_id in samples:
            self.sample_changed(SampleFact(sample_id=sample_id, status=SampleStatus.CANCELLED))

    def rows_read(self, group_id: str, rows: tuple[Row, ...]) -> None:
        """The store told a group's rows: its end can be written, once its scope is closed."""
        group = self.groups[group_id]
        group.rows = rows
        group.stage = GroupStage.CLOSING
        self._closing.rows_known(group)

    def take_asks(self) -> dict[str, Scopes]:
        """What the run's own estimator has to be asked, by group, since the last call."""
        return self._closing.take_asks()

    def ask_again(self, group_id: str, scopes: Scopes) -> None:
        """The answer was lost."""
        self._closing.ask_again(group_id, scopes)

    def advantages_made(self, group_id: str, own: Scopes) -> None:
        """The run's own estimator has answered: the group's end can be written."""
        self._closing.close(self.groups[group_id], own)

    def closed(self, effect: CloseGroup) -> tuple[Row, ...]:
        """The store has closed or dropped the group; returns the rows that it released."""
        group = self.groups[effect.group_id]
        self._end(group, effect.status, released=len(effect.released))
        self._due[effect.group_id] = None
        return tuple(folded(item.row for item in effect.released))

    def due(self) -> list[AdmitGroups | CancelSamples | ReadRows | CloseGroup]:
        """What the batch needs now, and the groups that something happened to."""
        effects: list[AdmitGroups | CancelSamples | ReadRows | CloseGroup] = []
        effects.extend(self._admit(self._admission.opening()))
        for group_id in self._due:
            group = self.groups[group_id]
            if group.stage is GroupStage.OPEN:
                effects.extend(self._decide(group))
            else:
                self._replace(group)
        self._due.clear()
        effects.extend(self._closing.due(may_grow=self._admission.is_replacing))
        effects.extend(self._admit(self._admission.replacing()))
        return effects

    def take_startable(self) -> list[SampleId]:
        """Sample attempts that became due since the last call."""
        due, self._to_start = self._to_start, []
        return due

    # How it is done

    def _reaches(self, group: GroupState, policy: str) -> bool:
        return group.stage is not GroupStage.TERMINAL and group_reaches(
            policy,
            group.newest(),
            num_wanted=self._rules.samples_per_group,
            rules=self._rules.closure,
            replaced=self._admission.num_replaced,
        )

    def _end(self, group: GroupState, status: GroupStatus, *, released: int) -> None:
        group.stage = GroupStage.TERMINAL
        group.status = status
        group.released = released
        self._num_terminal += 1

    def _decide(self, group: GroupState) -> Iterator[CancelSamples | ReadRows]:
        decision = decide_group(
            group.current,
            num_wanted=self._rules.samples_per_group,
            rules=self._rules.closure,
        )
        match decision:
            case Wait():
                return
            case Refill(ordinals):
                self._to_start.extend(group.begin(ordinals))
            case CancelRest(ordinals, reason):
                if not group.cancelled:
                    group.cancelled = True
                    cut = tuple(group.sample_id(ordinal) for ordinal in ordinals)
                    yield CancelSamples(samples=cut, reason=reason)
            case Fail(reason):
                self.failure = self._failure_of(group, reason)
            case Close() | Drop():
                group.decision = decision
                group.stage = GroupStage.READING
                yield ReadRows(
                    batch=self.batch.batch, group_id=group.spec.group_id, reason=decision.reason
                )
            case _:
                assert_never(decision)

    def _failure_of(self, group: GroupState, reason: str) -> RunFailure:
        failures = (fact.failure for fact in group.samples.values() if fact.failure is not None)
        first = next(failures, RunFailure(reason="INTERNAL", message="no reason was given"))
        return RunFailure(
            reason=first.reason,
            message=f"{first.message} ({reason})",
            metadata={**first.metadata, "group": group.spec.group_id},
        )

    def _admit(self, effects: Iterable[AdmitGroups]) -> Iterator[AdmitGroups]:
        for effect in effects:
            for spec in effect.groups:
                self._add(spec, GroupStage.ADMITTING)
            yield effect

    def _replace(self, group: GroupState) -> None:
        exhausted = not self._admission.replace(group)
        if exhausted and self._rules.closure.on_replace_exhausted == "fail":
            message = (
                f"group {group.spec.group_id} was dropped after {self._admission.num_replaced} "
                "replacement(s), and batch.on_replace_exhausted = 'fail'"
            )
            self.failure = self._failure_of(group, message)

    def _add(self, spec: GroupSpec, stage: GroupStage) -> GroupState:
        group = GroupState(spec, GroupId(self.batch, spec.ordinal), stage)
        redundant = self._rules.closure.redundant_samples
        group.begin(range(self._rules.samples_per_group + redundant))
        self.groups[spec.group_id] = group
        return group
