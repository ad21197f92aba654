"""Whether a policy can still be reached: what lets its subgraph be closed before the batch ends.

A subgraph is closed when no row of the policy can come any more and none waits for its group's end.
Then the last micro-batch is flushed and the policy is updated while other policies still sample.
An open sample reaches every policy that it has not left (`ctx.last`); a group that may be refilled
or replaced reaches every policy, since the sample or the group to come may call any.
"""

from __future__ import annotations

from collections.abc import Collection

from flexmarl.core.closure import ClosureRules, may_replace
from flexmarl.core.states import SampleStatus
from flexmarl.core.training_rows import SampleFact


def group_reaches(
    policy: str,
    samples: Collection[SampleFact],
    *,
    num_wanted: int,
    rules: ClosureRules,
    replaced: int,
) -> bool:
    """Whether a group that has not ended can still bring rows of a policy.

    Args:
        policy: The policy.
        samples: Newest attempt of each sample of the group.
        num_wanted: Samples that the group shall have (G).
        rules: Failure policy.
        replaced: Groups that the batch has replaced so far.
    """
    if any(_sample_reaches(policy, sample) for sample in samples):
        return True
    all_done = all(sample.status is SampleStatus.DONE for sample in samples)
    if all_done and not rules.filter_zero_variance:
        return False
    may_refill = rules.on_sample_failure == "refill" and not all_done
    added = len(samples) - num_wanted - rules.redundant_samples
    refillable = may_refill and added < rules.refill_max
    return refillable or may_replace(replaced=replaced, rules=rules)


def _sample_reaches(policy: str, sample: SampleFact) -> bool:
    match sample.status:
        case SampleStatus.OPEN:
            return policy not in sample.left or policy in sample.used
        case SampleStatus.DONE:
            return policy in sample.used
        case _:
            return False
