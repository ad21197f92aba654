"""The estimators by the name that a run's config gives them: one line each."""

from __future__ import annotations

from typing import Final

from flexmarl.core.estimators.base import Estimator
from flexmarl.core.estimators.group_relative import DR_GRPO, DR_MAS, GRPO
from flexmarl.core.estimators.reinforce_pp import REINFORCE_PP, REINFORCE_PP_BASELINE
from flexmarl.core.estimators.rloo import RLOO

ESTIMATORS: Final[dict[str, Estimator]] = {
    estimator.name: estimator
    for estimator in (GRPO, DR_GRPO, DR_MAS, RLOO, REINFORCE_PP, REINFORCE_PP_BASELINE)
}
