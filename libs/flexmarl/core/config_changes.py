"""Which settings may change when a run is resumed, and why the others may not.

A run that goes on must stay one run: what its open batch was drawn with, and what its stored rows,
states and cursor mean, is fixed. How fast it goes, how long, and how its steps are taken is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

ACCEPTED: Final = (
    "versions",
    "dataset.epochs",
    "evaluation.every",
    "batch.on_sample_failure",
    "batch.refill_max",
    "batch.replace_max",
    "batch.on_replace_exhausted",
    "workflow.sample_timeout_s",
    "workflow.reward_timeout_s",
    "workflow.num_workers",
    "workflow.max_samples_per_worker",
    "agents.*.timeout_s",
    "agents.*.max_attempts",
    "agents.*.infra_attempts",
    "policies.*.optimizer.*",
    "policies.*.rollout.instances",
    "policies.*.rollout.max_concurrency",
    "policies.*.trainer.world_size",
    "policies.*.trainer.max_world_size",
    "policies.*.trainer.micro_batch_rows",
    "policies.*.trainer.micro_batch_tokens",
    "policies.*.trainer.max_tokens_per_pass",
    "rollout.*",
    "trainer.*",
    "pipeline.*",
    "trackers.*",
    "store_shards",
)
"""Keys that may change, as patterns."""

_WHY: Final = (
    ("dataset.*", "the run's cursor is a place in that dataset"),
    ("evaluation.*", "what is held out decides what is trained on"),
    ("workflow.*", "stored samples are replayed by that workflow"),
    ("policies.*.model.*", "its trained weights belong to that model"),
    ("policies.*.loss.*", "saved gradients of the open batch are of that loss"),
    ("policies.*", "the open batch is sampled and trained with it"),
    ("agents.*", "stored calls of the open batch were made with it"),
    ("advantage.*", "rows of the open batch were released with it"),
    ("batch.*", "the open batch was admitted with it"),
)


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that is another one now.

    Attributes:
        key: Its name, with dots.
        old: Its value so far.
        new: Its value from now on.
        refused: Why it may not change; empty where it may.
    """

    key: str
    old: Any
    new: Any
    refused: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What differs between two resolved configurations, by key.

    Args:
        old: The stored configuration, as JSON data.
        new: The one to go on with.
    """
    before, after = dict(_flat(old, "")), dict(_flat(new, ""))
    return [
        Change(key, before.get(key), after.get(key), _refusal(key, before.get(key), after.get(key)))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _refusal(key: str, old: Any, new: Any) -> str:  # noqa: ANN401 - JSON values
    if key == "evaluation.every" and not (old and new):
        return "with the first evaluation, queries are held out that were trained on"
    if any(fnmatchcase(key, pattern) for pattern in ACCEPTED):
        return ""
    reasons = (why for pattern, why in _WHY if fnmatchcase(key, pattern))
    return next(reasons, "it is what makes the run this run")


def _flat(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{key}.")
        else:
            yield key, inner
