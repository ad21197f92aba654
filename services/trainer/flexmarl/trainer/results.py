"""What ranks report, put together for who asked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.trainer.v1 import rank_pb2, trainer_pb2
from flexmarl.core.ledger import Counts, Presence


def added_result(
    micro_batch_id: str,
    presence: Presence,
    *,
    counts: Counts | None = None,
    denominator: float = 0.0,
    num_model_tokens: int = 0,
    ranks: Sequence[rank_pb2.RankAdded] = (),
) -> trainer_pb2.ComputeGradientsResult:
    """Returns what became of a micro-batch.

    Metrics are means over its sampled tokens on all ranks; those of the loss are divided by
    `denominator`, as the update will divide them.
    """
    result = trainer_pb2.ComputeGradientsResult(
        micro_batch_id=micro_batch_id,
        added=presence is Presence.ADDED,
        non_finite=presence is Presence.DROPPED,
        metrics=_metrics(ranks, denominator=denominator, num_model_tokens=num_model_tokens),
        seconds=largest([rank.seconds for rank in ranks]),
    )
    if counts is not None and presence is Presence.ADDED:
        result.counts.CopyFrom(
            graph_pb2.GradientCounts(num_rows=counts.num_rows, num_tokens=counts.num_tokens)
        )
    return result


def largest(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the largest value of each name: ranks work side by side."""
    found: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = max(value, found.get(name, value))
    return found


def _metrics(
    ranks: Sequence[rank_pb2.RankAdded], *, denominator: float, num_model_tokens: int
) -> dict[str, float]:
    num_tokens = sum(rank.num_tokens for rank in ranks)
    if not num_tokens:
        return {}
    sums: dict[str, float] = defaultdict(float)
    for rank in ranks:
        for name, value in rank.sums.items():
            sums[name] += value
    metrics = {
        name: value / (denominator if name.startswith("loss") else num_tokens)
        for name, value in sums.items()
    }
    metrics |= largest([rank.maxima for rank in ranks])
    work_s = max(sum(rank.seconds.values()) for rank in ranks)
    if work_s > 0:
        metrics["tokens_per_s"] = num_model_tokens / work_s
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
