"""How a group's end is written: the advantages of its rows, and why others are void.

rows known -> the run's own estimator is asked, if it has one -> closed or dropped
batch scope: held until the whole batch is known
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from flexmarl.core.advantages import (
    FinishedSample,
    GroupAdvantages,
    Scopes,
    group_advantages,
    group_scopes,
    whiten_batch,
)
from flexmarl.core.batch_rules import BatchRules
from flexmarl.core.chains import chained
from flexmarl.core.closure import Close, Drop, redundant_ordinals
from flexmarl.core.group_state import GroupStage, GroupState
from flexmarl.core.ids import BatchId, SampleId
from flexmarl.core.run_effects import CloseGroup
from flexmarl.core.states import GroupStatus, SampleStatus, VoidReason
from flexmarl.core.training_rows import Rewards, Row, RowVoid

_DEAD_ROWS = {
    SampleStatus.FAILED: VoidReason.SAMPLE_FAILED,
    SampleStatus.CANCELLED: VoidReason.SAMPLE_FAILED,
    SampleStatus.SUPERSEDED: VoidReason.REPLAY_DIVERGED,
}


class GroupClosing:
    """Ends of the groups of one batch attempt; see the module.

    Args:
        batch: Batch and attempt.
        groups: Its groups by id, which the batch adds to; read here.
        rules: Sizes, failure policy and advantages.
    """

    def __init__(self, batch: BatchId, groups: Mapping[str, GroupState], rules: BatchRules) -> None:
        self._batch = batch
        self._groups = groups
        self._rules = rules
        self._updated: Collection[str] = ()
        self._asks: dict[str, Scopes] = {}
        self._held: dict[str, CloseGroup] = {}
        self._closures: list[CloseGroup] = []

    def dead_reason(self, group: GroupState, sample_id: str) -> VoidReason | None:
        """Why rows of a sample attempt are not trained on; None while nothing is against them."""
        status = group.status_of(sample_id)
        ended = status in (SampleStatus.DONE, SampleStatus.CANCELLED)
        if ended and SampleId.parse(sample_id).ordinal in self._redundant(group):
            return VoidReason.REDUNDANT
        return _DEAD_ROWS.get(status)

    # What happens

    def restored(self, updated: Collection[str]) -> None:
        """The groups that the store has are known.

        Args:
            updated: Policies whose update is made: rows that groups bring in place of lost ones
                come too late for it.
        """
        self._updated = updated
        for group in self._groups.values():
            if group.stage is GroupStage.TERMINAL:
                group.zero_variance = self._advantages(group).zero_variance

    def rows_known(self, group: GroupState) -> None:
        """A group's rows are known: its end can be written, once its scope is closed."""
        if self._rules.advantage.is_own and isinstance(group.decision, Close):
            scopes = group_scopes(self._finished(group), self._rules.advantage)
            if scopes:
                self._asks[group.spec.group_id] = scopes
                return
        self.close(group)

    def ask_again(self, group_id: str, scopes: Scopes) -> None:
        """The answer of the run's own estimator was lost."""
        self._asks[group_id] = scopes

    def close(self, group: GroupState, own: Scopes | None = None) -> None:
        """A group's end can be written; `own`: what the run's own estimator has answered."""
        closure = self._closure(group, own)
        if self._rules.advantage.release_scope == "batch" and closure.status is GroupStatus.CLOSED:
            self._held[closure.group_id] = closure
        else:
            self._closures.append(closure)

    # What is due

    def take_asks(self) -> dict[str, Scopes]:
        """What the run's own estimator has to be asked, by group, since the last call."""
        due, self._asks = self._asks, {}
        return due

    def due(self, *, may_grow: bool) -> list[CloseGroup]:
        """Ends to write; `may_grow`: a further group comes, which batch scope waits for."""
        if self._held and not may_grow and self._all_held():
            self._closures.extend(self._whitened())
            self._held.clear()
        closures, self._closures = self._closures, []
        return [self._final(closure) for closure in closures]

    # How it is done

    def _closure(self, group: GroupState, own: Scopes | None) -> CloseGroup:
        group_id, rows = group.spec.group_id, group.rows
        assert group.decision is not None, "rows are read once the group's end is decided"
        advantages = self._advantages(group, own)
        group.zero_variance = advantages.zero_variance
        flat = advantages.zero_variance and self._rules.closure.filter_zero_variance
        if flat and isinstance(group.decision, Close):
            reason = "all samples have the same reward"
            group.decision = Drop(VoidReason.ZERO_VARIANCE, reason)
        voided = list(advantages.voided)
        samples = dict.fromkeys(row.sample_id for row in rows)
        reasons = {sample_id: self.dead_reason(group, sample_id) for sample_id in samples}
        for row in rows:
            dead = reasons[row.sample_id]
            if row.trainable and dead is not None:
                voided.append(RowVoid(row, dead))
        if isinstance(group.decision, Close):
            return CloseGroup(
                batch=self._batch.batch,
                group_id=group_id,
                status=GroupStatus.CLOSED,
                drop_reason=None,
                released=advantages.released,
                voided=tuple(voided),
                reason=group.decision.reason,
            )
        why = group.decision.void_reason
        dropped = (RowVoid(item.row, why) for item in advantages.released)
        return CloseGroup(
            batch=self._batch.batch,
            group_id=group_id,
            status=GroupStatus.DROPPED,
            drop_reason=why,
            released=(),
            voided=(*dropped, *voided),
            reason=group.decision.reason,
        )

    def _final(self, closure: CloseGroup) -> CloseGroup:
        """The closure as it is written: with its chains, and what comes too late to be in them."""
        late = [item.row for item in closure.released if item.row.policy in self._updated]
        kept = [item for item in closure.released if item.row.policy not in self._updated]
        voided = (RowVoid(row, VoidReason.REDUNDANT) for row in late)
        return replace(closure, released=chained(kept), voided=(*closure.voided, *voided))

    def _all_held(self) -> bool:
        """Whether no group can end any more but those that are held."""
        return all(
            group_id in self._held or group.stage is GroupStage.TERMINAL
            for group_id, group in self._groups.items()
        )

    def _whitened(self) -> list[CloseGroup]:
        """The held closures; groups closed before a crash take part in the statistics."""
        before = [
            self._advantages(group)
            for group_id, group in self._groups.items()
            if group_id not in self._held and group.status is GroupStatus.CLOSED
        ]
        held = [self._advantages(self._groups[group_id]) for group_id in self._held]
        whitened = whiten_batch([*before, *held])[len(before) :]
        return [
            replace(closure, released=advantages.released)
            for closure, advantages in zip(self._held.values(), whitened, strict=True)
        ]

    def _redundant(self, group: GroupState) -> frozenset[int]:
        return redundant_ordinals(
            group.current,
            num_wanted=self._rules.samples_per_group,
            rules=self._rules.closure,
        )

    def _advantages(self, group: GroupState, own: Scopes | None = None) -> GroupAdvantages:
        return group_advantages(self._finished(group), self._rules.advantage, own=own)

    def _finished(self, group: GroupState) -> list[FinishedSample]:
        """Its samples that count, in the order of their ordinals whenever they ended."""
        by_sample: dict[str, list[Row]] = {}
        for row in group.rows:
            if row.trainable:
                by_sample.setdefault(row.sample_id, []).append(row)
        redundant = self._redundant(group)
        return [
            FinishedSample(
                sample_id=sample_id,
                rewards=fact.rewards or Rewards(),
                rows=by_sample.get(sample_id, ()),
            )
            for sample_id, fact in sorted(
                group.samples.items(), key=lambda item: item[1].sample_id.ordinal
            )
            if fact.status is SampleStatus.DONE and fact.sample_id.ordinal not in redundant
        ]
