"""Scalar advantages of one group: GRPO (arXiv 2402.03300), with and without division by the std.

Decisions that peers take differently, taken once here:

- Statistics take one value per finished sample; an agent called five times counts once, by the mean
  of its rows in the sample. A row's advantage uses its own reward.
- The std is the sample std (n - 1). `epsilon` is added to it, not used as a floor, so that low
  variance keeps its shape; below `epsilon` there is no variance to divide by, and the centred
  reward is taken as it is, so that no advantage explodes.
- A single value has the advantage 0: without others there is nothing to compare it with.
- A reward function that returns one number has given this reward to every agent. Where it names
  agents or vertices, whoever it leaves out has no reward, and those rows are void.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from flexmarl.core.states import VoidReason
from flexmarl.core.training_rows import Rewards, Row, RowAdvantage, RowVoid

Scope = Literal["group", "agent", "call_site"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRule:
    """How rewards become advantages.

    Attributes:
        scope: Which rewards are compared: the team's in the group, the agent's in the group, or
            those of the same call site in the group.
        normalize_std: Divide by the standard deviation.
        epsilon: Added to the standard deviation.
    """

    scope: Scope = "group"
    normalize_std: bool = True
    epsilon: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSample:
    """A sample whose workflow and reward function succeeded, with its trainable rows."""

    sample_id: str
    rewards: Rewards
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """What becomes of the trainable rows of a group's finished samples.

    Attributes:
        released: Rows with reward and advantage.
        voided: Rows without a reward.
        zero_variance: True when there were rewards and nothing told them apart.
    """

    released: tuple[RowAdvantage, ...]
    voided: tuple[RowVoid, ...]
    zero_variance: bool


@dataclass(frozen=True, slots=True)
class _Stats:
    count: int
    mean: float
    std: float


def group_advantages(samples: Iterable[FinishedSample], rule: AdvantageRule) -> GroupAdvantages:
    """Computes rewards and advantages of one group's rows.

    Args:
        samples: The group's finished samples; failed ones must not be among them.
        rule: Scope and normalisation.
    """
    key_of, reward_of = _SCOPES[rule.scope]
    valued: list[tuple[Hashable, Row, float]] = []
    voided: list[RowVoid] = []
    per_sample: dict[Hashable, list[float]] = {}
    for sample in samples:
        of_sample: dict[Hashable, list[float]] = {}
        for row in sample.rows:
            reward = reward_of(sample.rewards, row)
            if reward is None:
                voided.append(RowVoid(row, VoidReason.NO_REWARD))
                continue
            key = key_of(row)
            valued.append((key, row, reward))
            of_sample.setdefault(key, []).append(reward)
        if rule.scope == "group" and sample.rewards.team is not None:
            # A sample without trainable rows still is one of the answers to the query.
            of_sample = {"": [sample.rewards.team]}
        for key, rewards in of_sample.items():
            per_sample.setdefault(key, []).append(math.fsum(rewards) / len(rewards))
    stats = {key: _stats(values) for key, values in per_sample.items()}
    released = tuple(
        RowAdvantage(row, reward, _advantage(reward, stats[key], rule))
        for key, row, reward in valued
    )
    flat = bool(released) and all(
        stats[key].std < rule.epsilon and abs(reward - stats[key].mean) < rule.epsilon
        for key, _, reward in valued
    )
    return GroupAdvantages(released=released, voided=tuple(voided), zero_variance=flat)


def row_reward(rewards: Rewards, row: Row) -> float | None:
    """A row's own reward: the vertex's, else its agent's, else the only number there is."""
    own = rewards.vertices.get(row.vertex_id)
    if own is not None:
        return own
    own = rewards.agents.get(row.agent)
    if own is not None:
        return own
    if rewards.agents or rewards.vertices:
        return None
    return rewards.team


def _team_reward(rewards: Rewards, _row: Row) -> float | None:
    return rewards.team


def _stats(values: Sequence[float]) -> _Stats:
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return _Stats(1, mean, 0.0)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return _Stats(count, mean, math.sqrt(variance))


def _advantage(reward: float, stats: _Stats, rule: AdvantageRule) -> float:
    if stats.count == 1:
        return 0.0
    centred = reward - stats.mean
    if not rule.normalize_std or stats.std < rule.epsilon:
        return centred
    return centred / (stats.std + rule.epsilon)


_SCOPES: dict[Scope, tuple[Callable[[Row], Hashable], Callable[[Rewards, Row], float | None]]] = {
    "group": (lambda _row: "", _team_reward),
    "agent": (lambda row: row.agent, row_reward),
    # The path alone is the call site; with another agent at the same path it is another one.
    "call_site": (lambda row: (row.agent, row.path), row_reward),
}
