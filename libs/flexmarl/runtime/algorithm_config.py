"""The part of a run's configuration that says how it learns: advantages, losses, optimizers."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from flexmarl.core.advantages import AdvantageRule, make_rule
from flexmarl.core.estimators.base import Scope
from flexmarl.core.ledger import Aggregation, Counts
from flexmarl.core.overlong import OverlongRule
from flexmarl.core.schedules import Decay, RateSchedule
from flexmarl.runtime.config_section import Section

LOSS_KINDS: Final = ("ppo_clip", "dual_clip", "gspo", "cispo")
"""Losses of the trainer; beside them any "module:function" of the run's own package."""

_Beta = Annotated[float, Field(ge=0, lt=1)]

_DOTTED: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class OverlongConfig(Section):
    """Soft penalty of long responses (DAPO, arXiv 2503.14476)."""

    max_tokens: Annotated[int, Field(ge=1)]
    """Response length from which the penalty is whole."""
    buffer_tokens: Annotated[int, Field(ge=1)]
    """Tokens before it over which the penalty grows from 0."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """What the reward of an overlong response loses."""

    @model_validator(mode="after")
    def _inside(self) -> OverlongConfig:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError("buffer_tokens exceeds max_tokens")
        return self


class AdvantageConfig(Section):
    """How rewards become advantages."""

    estimator: str = "grpo"
    """grpo, dr_grpo, dr_mas, rloo, reinforce_pp or reinforce_pp_baseline; docs/algorithms.md has
    their papers. Or "module:function" of the run's own package: it is given the rewards of a scope,
    one per finished sample, and returns as many advantages."""
    scope: Scope | None = None
    """Rewards compared: the team's in the group, the agent's in it, or those of the same call
    (group, agent, call_site); unset means the estimator's own choice."""
    normalize_std: bool | None = None
    """Divide by the standard deviation of the scope; unset means the estimator's own choice."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the standard deviation."""
    overlong: OverlongConfig | None = None
    """Penalty of long responses; unset means none."""

    @model_validator(mode="after")
    def _possible(self) -> AdvantageConfig:
        self.rule()
        return self

    def rule(self) -> AdvantageRule:
        """Returns what the core decides with.

        Raises:
            ValueError: Naming the key that does not go with the estimator.
        """
        long = self.overlong
        return make_rule(
            self.estimator,
            scope=self.scope,
            normalize_std=self.normalize_std,
            epsilon=self.epsilon,
            overlong=None
            if long is None
            else OverlongRule(
                max_tokens=long.max_tokens,
                buffer_tokens=long.buffer_tokens,
                penalty=long.penalty,
            ),
        )


class ScheduleConfig(Section):
    """A number that moves linearly with the policy's updates."""

    start: float
    """Value at update 0."""
    end: float
    """Value from update `until` on."""
    until: Annotated[int, Field(ge=1)]
    """Update at which `end` is reached."""

    def at(self, num_updates: int) -> float:
        """Returns the value after `num_updates` updates."""
        share = min(num_updates / self.until, 1.0)
        return self.start + (self.end - self.start) * share


class OptimizerConfig(Section):
    """The optimizer, its groups, and the schedule of its learning rate."""

    kind: Literal["adamw", "lion"] = "adamw"
    """AdamW (arXiv 1711.05101), or Lion (arXiv 2302.06675) with one moment instead of two."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate after the warm-up; Lion wants about a tenth of AdamW's."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """Decay of the moments; Lion's paper uses 0.9 and 0.99."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters that decay: those of two dimensions or more, or norms and biases, too."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Clip the policy's gradient to this norm."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises linearly."""
    schedule: Decay = "constant"
    """How the learning rate falls after the warm-up: constant, linear or cosine."""
    total_updates: Annotated[int, Field(ge=0)] = 0
    """Update at which the fall ends; needed by linear and cosine."""
    final_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that is left then."""

    @model_validator(mode="after")
    def _falls_somewhere(self) -> OptimizerConfig:
        if self.schedule != "constant" and self.total_updates <= self.warmup_updates:
            raise ValueError(
                f"total_updates = {self.total_updates}: schedule = {self.schedule!r} needs more "
                f"updates than warmup_updates = {self.warmup_updates}"
            )
        return self

    def rate(self) -> RateSchedule:
        """Returns the schedule of the learning rate."""
        return RateSchedule(
            peak=self.lr,
            warmup_updates=self.warmup_updates,
            decay=self.schedule,
            total_updates=self.total_updates,
            final_share=self.final_share,
        )


class KlConfig(Section):
    """Divergence from the policy's first weights, as a term of the loss."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator per token; k1 has no useful gradient in a loss (docs/algorithms.md)."""
    coefficient: float | ScheduleConfig = 1e-3
    """Weight of the term."""

    def at(self, num_updates: int) -> float:
        """Returns the coefficient after `num_updates` updates."""
        return _at(self.coefficient, num_updates)


class LossConfig(Section):
    """The policy-gradient loss."""

    kind: str = "ppo_clip"
    """ppo_clip, dual_clip, gspo or cispo, or "module:function" of the workflow's package."""
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """Lower clip of the ratio."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Upper clip of the ratio; above `clip_low` it is DAPO's clip-higher."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """Bound of the ratio where the advantage is negative; dual_clip only."""
    old: Literal["proximal", "behaviour"] = "proximal"
    """The ratio's denominator: the trainer's log-probs at the batch's weights, or the engine's."""
    correction: Literal["token", "sequence"] = "token"
    """Whether the correction is per token or, as a product, per row."""
    correction_cap: Annotated[float, Field(gt=0)] | None = None
    """Cap of the detached factor proximal / behaviour; unset means no correction."""
    aggregation: Aggregation = "token_mean"
    """token_mean, seq_mean_token_sum, seq_mean_token_mean, or dr_grpo (rows times the limit)."""
    response_limit: Annotated[int, Field(ge=1)] | None = None
    """Longest response in tokens that dr_grpo divides by; needed by it alone."""
    entropy: float | ScheduleConfig = 0.0
    """Coefficient of the entropy bonus."""
    kl: KlConfig | None = None
    """Divergence from the first weights; unset means none."""

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in LOSS_KINDS and not _DOTTED.fullmatch(value):
            raise ValueError(
                f'{value!r} is not one of {", ".join(LOSS_KINDS)}, nor a "module:function"'
            )
        return value

    @model_validator(mode="after")
    def _fits(self) -> LossConfig:
        if self.old == "behaviour" and self.correction_cap is not None:
            raise ValueError(
                'correction_cap: with old = "behaviour" the ratio holds the correction already; '
                "remove one of them"
            )
        if self.aggregation == "dr_grpo" and self.response_limit is None:
            raise ValueError(
                'response_limit: aggregation = "dr_grpo" divides by it; set it to the largest '
                "max_tokens of the policy's agents"
            )
        return self

    def denominator(self, counts: Counts) -> float:
        """Returns what a gradient sum of these rows is divided by, once, at apply."""
        return counts.denominator(self.aggregation, response_limit=self.response_limit or 1)

    def entropy_at(self, num_updates: int) -> float:
        """Returns the entropy coefficient after `num_updates` updates."""
        return _at(self.entropy, num_updates)


class LoraConfig(Section):
    """A low-rank adapter that is trained in place of the weights (arXiv 2106.09685)."""

    rank: Annotated[int, Field(ge=1)] = 8
    """Rank of each update."""
    alpha: Annotated[int, Field(ge=1)] = 16
    """Scale: the update is alpha / rank times the product of the two factors."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    )
    """Linear layers that get one, by the last part of their name; the output head cannot."""


def _at(value: float | ScheduleConfig, num_updates: int) -> float:
    return value.at(num_updates) if isinstance(value, ScheduleConfig) else value
