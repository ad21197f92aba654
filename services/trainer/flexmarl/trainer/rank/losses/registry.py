"""The losses by the name that a run's config gives them: one algorithm, one file, one line here."""

from __future__ import annotations

from typing import Final

from flexmarl.trainer.rank.losses.base import PolicyLoss
from flexmarl.trainer.rank.losses.cispo import cispo
from flexmarl.trainer.rank.losses.dual_clip import dual_clip
from flexmarl.trainer.rank.losses.gspo import gspo
from flexmarl.trainer.rank.losses.ppo_clip import ppo_clip

LOSSES: Final[dict[str, PolicyLoss]] = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
}
