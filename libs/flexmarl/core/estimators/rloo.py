"""RLOO: reward minus the mean of the *other* samples (arXiv 2402.14740, equation 8).

No division by a standard deviation, and no way to ask for one: with rewards 1, 0, 0, 0 the others
of the first have none, and the advantage would be a million. A sample without others has the
advantage 0; some peers give it the raw reward, which is a policy gradient without a baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexmarl.core.estimators.base import Centre, Estimator


def leave_one_out(values: Sequence[float], _normalize_std: bool, _epsilon: float) -> Centre:
    """Returns the reward minus the mean of the scope's other samples."""
    others = len(values) - 1
    if not others:
        return lambda _reward, _own: 0.0
    total = math.fsum(values)
    return lambda reward, own: reward - (total - own) / others


RLOO = Estimator(
    name="rloo", scopes=("group", "agent", "call_site"), baseline=leave_one_out, normalizes=False
)
