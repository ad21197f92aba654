"""Batches that train nothing: bad luck, or a run that would go on for ever and never learn.

A batch from which no policy consumed a row moves the version and nothing else. Once that may
happen; what cannot come right by itself ends the run, with what the user has to change:

- rows there are, and not one has a reward: the reward function and `advantage.scope` do not fit
- several such batches in a row: everything fails, or the workflow calls no trained agent

Batches whose groups were filtered because all their rewards are equal count neither way: a team
that solves everything, or nothing yet, is no fault of the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexmarl.core.errors import ErrorReason
from flexmarl.core.estimators.base import Scope
from flexmarl.core.states import VoidReason
from flexmarl.core.training_rows import RunFailure

MAX_IN_A_ROW = 3
"""Batches in a row that may train nothing; the last of them ends the run."""

_NO_TEAM_REWARD = (
    "advantage.scope = 'group' compares team rewards, and the reward function returned none: "
    "return a number or Rewards(team=...), or set advantage.scope to 'agent' or 'call_site'"
)
_NO_OWN_REWARD = (
    "advantage.scope = {scope!r} compares the rewards of agents or calls, and the reward function "
    "returned none for those that were called: return a number, or a reward per agent or per call"
)


@dataclass(slots=True)
class IdleWatch:
    """Looks at every batch that is about to be committed.

    Attributes:
        scope: Which rewards the run compares.
        in_a_row: Batches in a row, up to now, that trained nothing.
    """

    scope: Scope
    in_a_row: int = 0

    def judge(
        self,
        batch: int,
        *,
        trained: bool,
        voided: Mapping[VoidReason, int],
        sample_failure: RunFailure | None,
    ) -> RunFailure | None:
        """Says whether the run shall end because of a batch, and why.

        Args:
            batch: Number of the batch.
            trained: Whether any policy consumed a row.
            voided: Its void rows by reason, over all policies.
            sample_failure: Why one of its samples failed; None when none did.
        """
        if trained:
            self.in_a_row = 0
            return None
        counts = {reason: count for reason, count in voided.items() if count}
        if set(counts) == {VoidReason.NO_REWARD}:
            return RunFailure(
                reason=ErrorReason.REWARD_INVALID.value,
                message=(
                    f"batch {batch}: none of its {counts[VoidReason.NO_REWARD]} rows has a reward, "
                    f"so nothing can be trained; {self._remedy()}"
                ),
            )
        if VoidReason.ZERO_VARIANCE in counts:
            return None
        self.in_a_row += 1
        if self.in_a_row < MAX_IN_A_ROW:
            return None
        return _never_trains(batch, counts, sample_failure)

    def _remedy(self) -> str:
        if self.scope == "group":
            return _NO_TEAM_REWARD
        return _NO_OWN_REWARD.format(scope=self.scope)


def _never_trains(
    batch: int, counts: Mapping[VoidReason, int], sample_failure: RunFailure | None
) -> RunFailure:
    rows = ", ".join(f"{reason.value} {count}" for reason, count in sorted(counts.items()))
    what = f"void rows: {rows}" if rows else "no agent of a trained policy finished a call"
    message = f"{MAX_IN_A_ROW} batches in a row, up to batch {batch}, trained nothing ({what})"
    if VoidReason.NON_FINITE in counts:
        return RunFailure(reason=ErrorReason.NON_FINITE.value, message=message)
    if sample_failure is None:
        return RunFailure(reason=ErrorReason.WORKFLOW_RAISED.value, message=message)
    return RunFailure(
        reason=sample_failure.reason,
        message=f"{message}; a sample failed with: {sample_failure.message}",
        metadata=sample_failure.metadata,
    )
