"""REINFORCE++: the reward itself, whitened over the whole batch (arXiv 2501.03262).

- `reinforce_pp` has no baseline but the batch's mean.
- `reinforce_pp_baseline` first takes off the mean of the scope, as the paper does for several
  samples per query, and then whitens over the batch.

The statistics of a policy are over one value per sample that it served, not per token as in some
peers: a sample with long answers, or with an agent called five times, counts once, as in every
other estimator here. The paper's penalty on divergence belongs to the loss (`loss.kl`).
"""

from __future__ import annotations

from collections.abc import Sequence

from flexmarl.core.estimators.base import Centre, Estimator
from flexmarl.core.estimators.group_relative import centred


def _reward(_values: Sequence[float], _normalize_std: bool, _epsilon: float) -> Centre:
    return lambda reward, _own: reward


REINFORCE_PP = Estimator(
    name="reinforce_pp",
    scopes=("group", "agent", "call_site"),
    baseline=_reward,
    normalizes=False,
    whitens_batch=True,
)

REINFORCE_PP_BASELINE = Estimator(
    name="reinforce_pp_baseline",
    scopes=("group", "agent", "call_site"),
    baseline=centred,
    normalizes=False,
    whitens_batch=True,
)
