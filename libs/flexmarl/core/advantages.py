"""From the rewards of a group's finished samples to the advantages of its rows.

What holds for every estimator, decided once:

- Statistics take one value per finished sample; an agent called five times counts once, by the mean
  of its rows in the sample. A row's advantage uses its own reward.
- A reward function that returns one number has given this reward to every agent. Where it names
  agents or vertices, whoever it leaves out has no reward, and those rows are void.
- The penalty of an overlong response is part of its row's reward before anything is compared.
- An estimator of the run's own package (`module:function`) is asked for one advantage per value of
  a scope; all rows of a sample in the scope have it. It runs where user code runs, so what it says
  is given to `group_advantages`, after `group_scopes` has told what to ask it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flexmarl.core.estimators.base import ReleaseScope, Scope, moments, whitening
from flexmarl.core.estimators.registry import ESTIMATORS
from flexmarl.core.overlong import OverlongRule
from flexmarl.core.states import VoidReason
from flexmarl.core.training_rows import Rewards, Row, RowAdvantage, RowVoid


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRule:
    """How rewards become advantages.

    Attributes:
        estimator: Name of the estimator.
        scope: Which rewards are compared.
        normalize_std: Divide by the standard deviation of the scope.
        epsilon: Added to the standard deviation; less than this is no variance.
        overlong: Penalty of long responses; None: there is none.
    """

    estimator: str = "grpo"
    scope: Scope = "group"
    normalize_std: bool = True
    epsilon: float = 1e-6
    overlong: OverlongRule | None = None

    @property
    def is_own(self) -> bool:
        """Whether the estimator is a function of the run's own package."""
        return ":" in self.estimator

    @property
    def release_scope(self) -> ReleaseScope:
        """What has to be closed before a row can be released."""
        found = ESTIMATORS.get(self.estimator)
        return "batch" if found is not None and found.whitens_batch else self.scope


def make_rule(
    estimator: str,
    *,
    scope: Scope | None,
    normalize_std: bool | None,
    epsilon: float,
    overlong: OverlongRule | None,
) -> AdvantageRule:
    """Fills in what an estimator takes by itself, and refuses what it cannot be asked for.

    Raises:
        ValueError: Naming the key.
    """
    if ":" in estimator:
        if normalize_std is not None:
            raise ValueError(f"normalize_std: {estimator} divides by what it likes; remove it")
        return AdvantageRule(
            estimator=estimator, scope=scope or "group", epsilon=epsilon, overlong=overlong
        )
    found = ESTIMATORS.get(estimator)
    if found is None:
        raise ValueError(
            f"estimator {estimator!r}: there are: {', '.join(ESTIMATORS)}, or a "
            '"module:function" of the package'
        )
    if scope is not None and scope not in found.scopes:
        raise ValueError(f"scope = {scope!r}: {estimator} takes {' or '.join(found.scopes)}")
    if normalize_std not in (None, found.normalizes) and not found.optional:
        does = "always divides" if found.normalizes else "never divides"
        raise ValueError(f"normalize_std: {estimator} {does} by the standard deviation; remove it")
    return AdvantageRule(
        estimator=estimator,
        scope=found.scopes[0] if scope is None else scope,
        normalize_std=found.normalizes if normalize_std is None else normalize_std,
        epsilon=epsilon,
        overlong=overlong,
    )


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
class _Valued:
    """A row with its reward, as written and as compared, in its scope."""

    key: Hashable
    row: Row
    reward: float
    shaped: float


Scopes = tuple[tuple[float, ...], ...]
"""One number per finished sample, for each scope of a group."""


@dataclass(frozen=True, slots=True)
class _Compared:
    """Rewards of a group: rows, what is void, and the values of each scope.

    `place` says where among the values of a scope a sample's own one is.
    """

    rows: Sequence[_Valued]
    voided: Sequence[RowVoid]
    values: Mapping[Hashable, Sequence[float]]
    place: Mapping[tuple[str, Hashable], int]


def group_scopes(samples: Iterable[FinishedSample], rule: AdvantageRule) -> Scopes:
    """Returns the values of each scope that an estimator of the run's own is asked about."""
    return tuple(tuple(values) for values in _compare(samples, rule).values.values())


def group_advantages(
    samples: Iterable[FinishedSample], rule: AdvantageRule, *, own: Scopes | None = None
) -> GroupAdvantages:
    """Computes rewards and advantages of one group's rows.

    With an estimator that whitens the batch they are those before `whiten_batch`.

    Args:
        samples: The group's finished samples; failed ones must not be among them.
        rule: Estimator, scope and normalisation.
        own: What the run's own estimator says to `group_scopes` of the same samples; without it
            such advantages are 0, and only the rest of the result counts.
    """
    group = _compare(samples, rule)
    centres = _own_centres(group, own) if rule.is_own else _centres(group, rule)
    released = tuple(
        RowAdvantage(
            item.row,
            item.reward,
            centres[item.key](item.shaped, group.place[item.row.sample_id, item.key]),
        )
        for item in group.rows
    )
    return GroupAdvantages(
        released=released,
        voided=tuple(group.voided),
        zero_variance=_flat(group.rows, group.values, rule.epsilon),
    )


_Placed = Callable[[float, int], float]
"""Advantage of (a row's own reward, the place of its sample in the scope)."""


def _centres(group: _Compared, rule: AdvantageRule) -> dict[Hashable, _Placed]:
    baseline = ESTIMATORS[rule.estimator].baseline

    def placed(values: Sequence[float]) -> _Placed:
        centre = baseline(values, rule.normalize_std, rule.epsilon)
        return lambda reward, place: centre(reward, values[place])

    return {key: placed(values) for key, values in group.values.items()}


def _own_centres(group: _Compared, own: Scopes | None) -> dict[Hashable, _Placed]:
    if own is None:
        own = tuple((0.0,) * len(values) for values in group.values.values())

    def placed(advantages: Sequence[float]) -> _Placed:
        return lambda _reward, place: advantages[place]

    return {key: placed(found) for key, found in zip(group.values, own, strict=True)}


def _compare(samples: Iterable[FinishedSample], rule: AdvantageRule) -> _Compared:
    valued: list[_Valued] = []
    voided: list[RowVoid] = []
    values: dict[Hashable, list[float]] = {}
    place: dict[tuple[str, Hashable], int] = {}
    for sample in samples:
        rows = _values_of(sample, rule, voided)
        valued.extend(rows)
        for key, value in _sample_values(sample, rows, rule).items():
            of_scope = values.setdefault(key, [])
            place[sample.sample_id, key] = len(of_scope)
            of_scope.append(value)
    return _Compared(valued, voided, values, place)


def whiten_batch(groups: Sequence[GroupAdvantages]) -> list[GroupAdvantages]:
    """Whitens the advantages of a batch, per policy, by one value per sample.

    Args:
        groups: All groups of the batch that are trained on.
    """
    per_sample: dict[str, dict[str, list[float]]] = {}
    for group in groups:
        for item in group.released:
            of_policy = per_sample.setdefault(item.row.policy, {})
            of_policy.setdefault(item.row.sample_id, []).append(item.advantage)
    scales = {
        policy: whitening([math.fsum(of) / len(of) for of in samples.values()])
        for policy, samples in per_sample.items()
    }

    def whitened(item: RowAdvantage) -> RowAdvantage:
        mean, factor = scales[item.row.policy]
        return RowAdvantage(item.row, item.reward, (item.advantage - mean) * factor)

    return [
        replace(group, released=tuple(whitened(item) for item in group.released))
        for group in groups
    ]


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


def _values_of(sample: FinishedSample, rule: AdvantageRule, voided: list[RowVoid]) -> list[_Valued]:
    key_of, reward_of = _SCOPES[rule.scope]
    found = []
    for row in sample.rows:
        reward = reward_of(sample.rewards, row)
        if reward is None:
            voided.append(RowVoid(row, VoidReason.NO_REWARD))
            continue
        penalty = 0.0 if rule.overlong is None else rule.overlong.of(row.num_response_tokens)
        found.append(_Valued(key_of(row), row, reward, reward + penalty))
    return found


def _sample_values(
    sample: FinishedSample, rows: Sequence[_Valued], rule: AdvantageRule
) -> dict[Hashable, float]:
    """The sample's one value per scope that it takes part in."""
    if rule.scope == "group" and sample.rewards.team is not None and not rows:
        # A sample without trainable rows still is one of the answers to the query.
        return {"": sample.rewards.team}
    of_sample: dict[Hashable, list[float]] = {}
    for item in rows:
        of_sample.setdefault(item.key, []).append(item.shaped)
    return {key: math.fsum(of) / len(of) for key, of in of_sample.items()}


def _flat(
    valued: Sequence[_Valued], values: Mapping[Hashable, Sequence[float]], epsilon: float
) -> bool:
    found = {key: moments(of) for key, of in values.items()}
    return bool(valued) and all(
        found[item.key].std < epsilon and abs(item.shaped - found[item.key].mean) < epsilon
        for item in valued
    )


_SCOPES: dict[Scope, tuple[Callable[[Row], Hashable], Callable[[Rewards, Row], float | None]]] = {
    "group": (lambda _row: "", _team_reward),
    "agent": (lambda row: row.agent, row_reward),
    # The path alone is the call site; with another agent at the same path it is another one.
    "call_site": (lambda row: (row.agent, row.path), row_reward),
}
