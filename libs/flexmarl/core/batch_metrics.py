"""The numbers of one batch: rewards, tokens, and where the time went.

A step reaches from one batch's last update to the next one's, so that the steps of a run add up to
its time. Its parts, in order: the commit of the batch before, its hand-over (activation), the
rollout until the last group closed, and the training that was left then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flexmarl.core.advantages import row_reward
from flexmarl.core.batch import BatchGroups
from flexmarl.core.errors import ErrorReason
from flexmarl.core.group_state import GroupState
from flexmarl.core.policy_training import RecordStage
from flexmarl.core.states import GroupStatus, SampleStatus
from flexmarl.core.training import Training
from flexmarl.core.training_rows import Rewards, SampleFact

_REWARD_FAILURES = frozenset((ErrorReason.REWARD_RAISED.value, ErrorReason.REWARD_INVALID.value))


@dataclass(slots=True)
class StepClock:
    """Moments of the present step, in seconds; what did not happen yet is None.

    Attributes:
        begun: Updates of the batch before were made.
        committed: It was committed.
        activated: Its version became active.
        closed: The last group so far closed.
    """

    begun: float
    committed: float | None = None
    activated: float | None = None
    closed: float | None = None

    def parts(self, now: float) -> dict[str, float]:
        """Seconds of the step that ends now, and of its parts."""
        committed = self.begun if self.committed is None else self.committed
        activated = committed if self.activated is None else self.activated
        closed = now if self.closed is None else max(self.closed, activated)
        return {
            "step_s": now - self.begun,
            "step/commit_s": committed - self.begun,
            "step/hand_over_s": activated - committed,
            "step/rollout_s": closed - activated,
            "step/training_tail_s": now - closed,
        }


@dataclass(slots=True)
class TrainMeans:
    """What trainers reported of a batch, per policy.

    Means are weighted by tokens, but for the largest of those whose name ends in `_max`; seconds
    and counts are summed; the newest of an update's numbers holds.
    """

    _sums: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    _totals: dict[tuple[str, str], float] = field(default_factory=dict)
    _newest: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, policy: str, metrics: Mapping[str, float], *, weight: float) -> None:
        """A micro-batch's numbers."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                continue
            if name.endswith("_max"):
                newest = self._newest.get((policy, name), value)
                self._newest[policy, name] = max(value, newest)
                continue
            total, weights = self._sums.get((policy, name), (0.0, 0.0))
            self._sums[policy, name] = (total + value * weight, weights + weight)

    def spend(self, policy: str, seconds: Mapping[str, float]) -> None:
        """Seconds of an operation, by part."""
        for part, value in seconds.items():
            self.count(policy, f"seconds/{part}", value)

    def count(self, policy: str, name: str, value: float = 1.0) -> None:
        """Something that adds up over the batch."""
        self._totals[policy, name] = self._totals.get((policy, name), 0.0) + value

    def put(self, policy: str, metrics: Mapping[str, float]) -> None:
        """An update's numbers: they hold for the whole batch."""
        for name, value in metrics.items():
            self._newest[policy, name] = value

    def take(self) -> dict[str, dict[str, float]]:
        """The numbers by policy and name; begins anew."""
        means = {key: total / weights for key, (total, weights) in self._sums.items() if weights}
        taken: dict[str, dict[str, float]] = {}
        for (policy, name), value in {**means, **self._totals, **self._newest}.items():
            taken.setdefault(policy, {})[name] = value
        self._sums.clear()
        self._totals.clear()
        self._newest.clear()
        return taken


def batch_metrics(batch: BatchGroups, training: Training, *, step_s: float) -> dict[str, float]:
    """Rewards and tokens of a batch whose updates are made.

    Args:
        batch: Its groups.
        training: Its policies.
        step_s: Seconds that it took, for the rates.
    """
    facts = [fact for group in batch.groups.values() for fact in group.samples.values()]
    done = [fact for fact in facts if fact.status is SampleStatus.DONE]
    team = [f.rewards.team for f in done if f.rewards is not None and f.rewards.team is not None]
    metrics: dict[str, float] = {
        "num_samples": float(len(done)),
        "num_failed": float(sum(fact.status is SampleStatus.FAILED for fact in facts)),
        "zero_variance_groups": float(sum(g.zero_variance for g in batch.groups.values())),
    }
    for reason in (failure_reason(fact) for fact in facts if fact.status is SampleStatus.FAILED):
        name = f"sample_failures/{reason}"
        metrics[name] = metrics.get(name, 0.0) + 1.0
    if team:
        metrics["team_reward"] = _mean(team)
    metrics.update(reward_alarms(facts))
    metrics.update(_means("reward/", _agent_rewards(batch)))
    metrics.update(_means("metric/", _named_metrics(done)))
    sampled = sum(row.num_response_tokens for g in batch.groups.values() for row in g.rows)
    trained = sum(
        vertex.num_response_tokens
        for policy in training.trained
        for record in policy.records.values()
        if record.stage is RecordStage.IN_SUM
        for row in record.rows
        for vertex in row.vertices
    )
    for name, count in (("sampled", sampled), ("trained", trained)):
        metrics[f"tokens/{name}"] = float(count)
        if step_s > 0:
            metrics[f"tokens_per_s/{name}"] = count / step_s
    return metrics


def reward_alarms(samples: Iterable[SampleFact]) -> dict[str, float]:
    """What a person should look at: `alarm/<name>` with a number of samples; none if all is well.

    `zero_rewards`: every reward of the batch is 0, so nothing tells good from bad; a scorer that
    finds no answer looks like this. `reward_failures`: the reward function failed on samples, which
    then have no reward, never a 0.
    """
    samples = list(samples)
    alarms: dict[str, float] = {}
    given = [fact.rewards for fact in samples if fact.rewards is not None]
    values = [value for rewards in given for value in _all_of(rewards)]
    if values and not any(values):
        alarms["alarm/zero_rewards"] = float(len(given))
    failed = sum(
        fact.failure is not None and fact.failure.reason in _REWARD_FAILURES for fact in samples
    )
    if failed:
        alarms["alarm/reward_failures"] = float(failed)
    return alarms


def _all_of(rewards: Rewards) -> Iterator[float]:
    if rewards.team is not None:
        yield rewards.team
    yield from rewards.agents.values()
    yield from rewards.vertices.values()


def failure_reason(fact: SampleFact) -> str:
    """Why a sample failed, by the error catalogue."""
    return ErrorReason.INTERNAL.value if fact.failure is None else fact.failure.reason


def num_groups(batch: BatchGroups, status: GroupStatus) -> int:
    """Groups that ended so."""
    return sum(group.status is status for group in batch.groups.values())


def _agent_rewards(batch: BatchGroups) -> Iterator[tuple[str, float]]:
    for group in batch.groups.values():
        yield from _agent_rewards_of(group)


def _agent_rewards_of(group: GroupState) -> Iterator[tuple[str, float]]:
    for row in group.rows:
        fact = group.samples.get(row.sample_id)
        if fact is None or fact.status is not SampleStatus.DONE or fact.rewards is None:
            continue
        reward = row_reward(fact.rewards, row)
        if reward is not None:
            yield row.agent, reward


def _named_metrics(done: Iterable[SampleFact]) -> Iterator[tuple[str, float]]:
    for fact in done:
        if fact.rewards is not None:
            yield from fact.rewards.metrics.items()


def _means(prefix: str, items: Iterable[tuple[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for name, value in items:
        values.setdefault(name, []).append(value)
    return {prefix + name: _mean(values[name]) for name in sorted(values)}


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
