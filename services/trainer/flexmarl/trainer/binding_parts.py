"""What a binding is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexmarl.client.store import StoreClient
from flexmarl.core.trainer_slots import Claim
from flexmarl.runtime.policy_config import PolicyConfig
from flexmarl.runtime.spans import SpanRecorder
from flexmarl.trainer.borrowing import Borrowed
from flexmarl.trainer.rank_group import RankGroup
from flexmarl.trainer.segments import StateSegments
from flexmarl.trainer.totals import Totals


@dataclass(slots=True)
class PassBudget:
    """Padded tokens per pass of a policy: as configured (0), or less since a pass did not fit."""

    max_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingParts:
    """What a binding is made of.

    Attributes:
        claim: Policy, term and slots.
        config: The policy.
        model_path: Folder of its base model on this node.
        model_hash: Hash of what is in it.
        package_path: Folder of the run's workflow package; empty when the policy needs none of it.
        init_seed: Seed of its initial weights.
        ranks: Workers of the slots, in order of rank.
        store: Home store.
        segments: Its segments.
        spans: Timeline.
        totals: Running sums of the trainer.
        max_queued: Most operations that wait.
        budget: Outlives the binding.
        borrowed: Slots of other trainers that it works on, too.
        cold_start: Replace the workers when the policy is suspended.
        on_lost: Gives the claim back when the binding is lost.
    """

    claim: Claim
    config: PolicyConfig
    model_path: str
    model_hash: str
    package_path: str
    init_seed: int
    ranks: RankGroup
    store: StoreClient
    segments: StateSegments
    spans: SpanRecorder
    totals: Totals
    max_queued: int
    budget: PassBudget
    borrowed: Sequence[Borrowed]
    cold_start: bool
    on_lost: Callable[[Claim], None]

    @property
    def frozen(self) -> bool:
        """Whether the policy is not trained: it has weights and nothing else."""
        return self.config.kind == "frozen"
