"""What a run's configuration says of its batches."""

from __future__ import annotations

from dataclasses import dataclass

from flexmarl.core.advantages import AdvantageRule
from flexmarl.core.closure import ClosureRules


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """Size of a batch, failure policy and advantages."""

    num_groups: int
    samples_per_group: int
    closure: ClosureRules
    advantage: AdvantageRule
