"""The account of one batch: every finished vertex of a trained policy is consumed or void."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from flexmarl.core.states import VertexStatus, VoidReason


@dataclass(slots=True)
class PolicyAccount:
    """Counts of one policy; a row that is both consumed and void counts in both and so shows."""

    finished: int = 0
    consumed: int = 0
    untrained: int = 0
    cancelled: int = 0
    voided: dict[VoidReason, int] = field(default_factory=dict)

    def balances(self) -> bool:
        """Whether finished = consumed + void + untrained."""
        return self.finished == self.consumed + sum(self.voided.values()) + self.untrained


class BatchAccount:
    """Adds up vertices by policy.

    Failed vertices never finished and are counted nowhere; cancelled ones are counted apart.

    Args:
        consumed_ids: Micro-batches in the saved ledgers: their rows are consumed, no others.
    """

    def __init__(self, consumed_ids: Collection[str]) -> None:
        self._consumed_ids = frozenset(consumed_ids)
        self.policies: dict[str, PolicyAccount] = {}

    def add(
        self,
        policy: str,
        *,
        status: VertexStatus,
        trainable: bool,
        void_reason: VoidReason | None,
        micro_batch_id: str,
    ) -> bool:
        """Counts one vertex.

        Returns:
            Whether the row is open: finished, trainable, neither consumed nor void.
        """
        account = self.policies.setdefault(policy, PolicyAccount())
        if status is VertexStatus.CANCELLED:
            account.cancelled += 1
        if status is not VertexStatus.DONE:
            return False
        account.finished += 1
        if not trainable:
            account.untrained += 1
            return False
        consumed = micro_batch_id in self._consumed_ids
        if consumed:
            account.consumed += 1
        if void_reason is not None:
            account.voided[void_reason] = account.voided.get(void_reason, 0) + 1
        return not consumed and void_reason is None
