"""When a group ends, and how: the failure policy of samples and groups.

A failed sample never enters the statistics: the group goes on without it (`drop_sample`), with
another one in its place (`refill`), or not at all. Every rule is bounded, so every group ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flexmarl.core.states import SampleStatus, VoidReason

MIN_SAMPLES = 2
"""Fewer finished samples than this cannot be compared with each other."""

FATAL_AT_ONCE = frozenset(
    {
        "WORKFLOW_IMPORT_FAILED",
        "UNKNOWN_AGENT",
        "MODEL_INVALID",
        "NOT_ENOUGH_INSTANCES",
        "UNKNOWN_CONFIG_KEY",
        "NOT_BUILT",
    }
)
"""Failures that no other sample can escape: they end the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosureRules:
    """What happens when parts of a batch fail.

    Attributes:
        on_sample_failure: What a failed sample does to its group.
        refill_max: Most samples added to one group.
        replace_max: Most groups added to one batch in place of dropped ones.
        on_replace_exhausted: Go on with a smaller batch, or fail the run.
        filter_zero_variance: Drop groups whose rewards are all the same.
        redundant_samples: Samples started beyond those that the group shall have: it closes when
            enough are done, and the slowest are cut (redundant rollouts, RollArt, OSDI'26).
    """

    on_sample_failure: Literal["refill", "drop_sample", "drop_group", "fail"] = "refill"
    refill_max: int = 2
    replace_max: int = 4
    on_replace_exhausted: Literal["smaller", "fail"] = "smaller"
    filter_zero_variance: bool = False
    redundant_samples: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Samples are missing."""


@dataclass(frozen=True, slots=True)
class Refill:
    """Add samples with these ordinals."""

    ordinals: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class CancelRest:
    """The group is lost, or has enough: cut the samples that still run."""

    ordinals: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """Train on what succeeded."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Train on nothing of the group."""

    void_reason: VoidReason
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the run."""

    reason: str


GroupDecision = Wait | Refill | CancelRest | Close | Drop | Fail


def decide_group(
    samples: Mapping[int, SampleStatus], *, num_wanted: int, rules: ClosureRules
) -> GroupDecision:
    """Says what to do with a group now.

    Args:
        samples: Status of the newest attempt of each sample, by ordinal.
        num_wanted: Samples that the group shall have (G).
        rules: Failure policy.
    """
    statuses = samples.values()
    done = sum(status is SampleStatus.DONE for status in statuses)
    running = tuple(sorted(o for o, status in samples.items() if status is SampleStatus.OPEN))
    failed = len(samples) - done - len(running)
    if has_enough(samples, num_wanted=num_wanted, rules=rules):
        if running:
            return CancelRest(running, f"{done} samples are done: {len(running)} are redundant")
        return Close(f"{num_wanted} of {len(samples)} samples were enough")
    if failed and rules.on_sample_failure == "fail":
        return Fail(f"{failed} failed sample(s), and batch.on_sample_failure = 'fail'")
    if failed and rules.on_sample_failure == "drop_group":
        if running:
            return CancelRest(running, f"{failed} failed sample(s) drop the group")
        return Drop(VoidReason.GROUP_DROPPED, f"{failed} failed sample(s) drop the group")
    if rules.on_sample_failure == "refill":
        missing = num_wanted - done - len(running)
        added = len(samples) - num_wanted - rules.redundant_samples
        count = min(missing, rules.refill_max - added)
        if count > 0:
            first = max(samples) + 1
            return Refill(tuple(range(first, first + count)), f"{failed} failed sample(s)")
    if running:
        return Wait()
    if done >= min(num_wanted, MIN_SAMPLES):
        return Close(f"{done} of {num_wanted} samples succeeded")
    return Drop(VoidReason.GROUP_DROPPED, f"only {done} of {num_wanted} samples succeeded")


def has_enough(
    samples: Mapping[int, SampleStatus], *, num_wanted: int, rules: ClosureRules
) -> bool:
    """Whether a group with redundant samples waits for no further one."""
    if not rules.redundant_samples:
        return False
    return sum(status is SampleStatus.DONE for status in samples.values()) >= num_wanted


def redundant_ordinals(
    samples: Mapping[int, SampleStatus], *, num_wanted: int, rules: ClosureRules
) -> frozenset[int]:
    """Samples that a group with enough does without: those that were cut, and those done late.

    When more are done than wanted, because several ended at once, the first by ordinal count: a
    recovered run chooses the same ones.
    """
    if not has_enough(samples, num_wanted=num_wanted, rules=rules):
        return frozenset()
    done = sorted(o for o, status in samples.items() if status is SampleStatus.DONE)
    cut = (o for o, status in samples.items() if status is SampleStatus.CANCELLED)
    return frozenset((*done[num_wanted:], *cut))


def may_replace(*, replaced: int, rules: ClosureRules) -> bool:
    """Whether a further group may be added to the batch in place of a dropped one."""
    return replaced < rules.replace_max


@dataclass(slots=True)
class FailureWatch:
    """Tells a broken run from unlucky samples.

    A failure of user code is an accident as long as any sample succeeded. When as many samples as a
    group holds have failed and none ever succeeded, it is the code.
    """

    num_wanted: int
    num_done: int = 0
    num_failed: int = 0

    def is_fatal(self, *, failed: bool, reason: str) -> bool:
        """Counts an ended sample, and says whether the run shall end because of it."""
        if not failed:
            self.num_done += 1
            return False
        self.num_failed += 1
        if reason in FATAL_AT_ONCE:
            return True
        return self.num_done == 0 and self.num_failed >= self.num_wanted
