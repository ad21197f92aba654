"""What the numbers of a policy's update say that somebody should look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

OUTSIDE_SHARE: Final = 0.25
"""Share of tokens whose ratio trainer / engine is outside [0.9, 1.1] that rounding cannot explain;
with bfloat16 engines about 0.08 is usual."""

MEAN_RATIO: Final = (0.5, 2.0)
"""Mean ratios of the loss that an update near its samples has."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm: its name in the metrics and one line for a person."""

    name: str
    text: str


def training_alarms(metrics: Mapping[str, float]) -> Iterator[Alarm]:
    """Yields the alarms of one policy's batch.

    Args:
        metrics: Its numbers, by the names that trainers give them.
    """
    outside = metrics.get("logprob_outside", 0.0)
    ratio = metrics.get("ratio", 1.0)
    if outside > OUTSIDE_SHARE or not MEAN_RATIO[0] <= ratio <= MEAN_RATIO[1]:
        yield Alarm(
            "ratio",
            f"{outside:.0%} of its tokens have another probability in the trainer than in the "
            f"engine, the mean ratio is {ratio:.3g}: compare temperature, dtype and chat template",
        )
    dropped = metrics.get("non_finite", 0.0)
    if dropped:
        yield Alarm("non_finite", f"{dropped:.0f} micro-batch(es) had no finite gradient")
    if metrics.get("weights_unchanged") and metrics.get("grad_norm"):
        yield Alarm(
            "weights_unchanged",
            "its update changed no published weight: the learning rate is lost in the rounding of "
            "rollout.dtype, or the wrong parameters are trained",
        )
