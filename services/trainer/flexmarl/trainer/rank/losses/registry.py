"""The losses by the name that a run's config gives them: one algorithm, one file, one line here."""

from __future__ import annotations

from typing import Final

from flexmarl.trainer.rank.losses.base import Loss
from flexmarl.trainer.rank.losses.grpo import grpo

LOSSES: Final[dict[str, Loss]] = {"grpo": grpo}
