"""GRPO and its kin: reward minus the mean of the scope (arXiv 2402.03300, equation 10 ff.).

- `grpo` divides by the standard deviation of the scope, unless told not to.
- `dr_grpo` never does (arXiv 2503.20783): the division weighs questions by how hard they are. With
  `loss.aggregation = "dr_grpo"` it is the paper's whole method.
- `dr_mas` is GRPO over each agent's own rewards (arXiv 2602.08847): one baseline for agents whose
  rewards differ in scale gives some of them gradients far too large.

Decisions that peers take differently, taken once here: the standard deviation is that of a sample
(n - 1). `epsilon` is added to it, not used as a floor, so that low variance keeps its shape; below
`epsilon` there is no variance to divide by, and the centred reward is taken as it is, so that no
advantage explodes. A single value has the advantage 0, not its raw reward: without others there is
nothing to compare it with.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexmarl.core.estimators.base import Centre, Estimator, moments


def centred(values: Sequence[float], normalize_std: bool, epsilon: float) -> Centre:
    """Returns the reward minus the mean of the scope, divided by its std if asked for."""
    found = moments(values)
    divisor = found.std + epsilon if normalize_std and found.std >= epsilon else 1.0
    if found.count == 1:
        return lambda _reward, _own: 0.0
    return lambda reward, _own: (reward - found.mean) / divisor


GRPO = Estimator(
    name="grpo",
    scopes=("group", "agent", "call_site"),
    baseline=centred,
    normalizes=True,
    optional=True,
)

DR_GRPO = Estimator(
    name="dr_grpo", scopes=("group", "agent", "call_site"), baseline=centred, normalizes=False
)

DR_MAS = Estimator(
    name="dr_mas", scopes=("agent",), baseline=centred, normalizes=True, optional=True
)
