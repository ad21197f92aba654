"""Evaluating a version on held-out queries: greedy and sampled, beside the batch of that version.

    admit -> samples run at the version -> every sample ended -> rows read -> numbers

An evaluation is pinned to its version: the next one is not committed before it has ended, and it
ends, as every sample has a deadline. What it samples is in the graph under ids of its own and is
never released, counted in a batch, or trained on. A sample that fails is counted, and not replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from flexmarl.core.advantages import row_reward
from flexmarl.core.ids import BatchId, GroupId, SampleId
from flexmarl.core.run_effects import AdmitGroups, GroupSpec, ReadRows
from flexmarl.core.states import SampleStatus
from flexmarl.core.training_rows import Row, SampleFact


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRules:
    """When versions are evaluated, and on what.

    Attributes:
        every: Versions from one evaluation to the next, the last version always; 0: never.
        num_queries: Held-out queries.
        greedy: Whether each query gets a sample of most likely tokens.
        num_sampled: Samples of each query drawn as in training.
    """

    every: int = 0
    num_queries: int = 0
    greedy: bool = True
    num_sampled: int = 1

    def is_due(self, version: int, *, last: bool) -> bool:
        """Whether a version is to be evaluated."""
        return self.every > 0 and (version % self.every == 0 or last)

    @property
    def ordinals(self) -> range:
        """Ordinals of each query's samples: 0 is the greedy one."""
        return range(0 if self.greedy else 1, self.num_sampled + 1)


@dataclass(slots=True)
class _Query:
    """One query: the newest attempt of each sample, and the facts of those that ended."""

    spec: GroupSpec
    group_id: GroupId
    attempts: dict[int, int]
    ended: dict[int, SampleFact] = field(default_factory=dict)
    rows: tuple[Row, ...] | None = None
    reading: bool = False


class Evaluation:
    """The evaluation of one version.

    Args:
        version: The version.
        rules: What is sampled.
        stored: Its samples that ended before a restart.
        attempt: Of the batch of that version.
    """

    def __init__(
        self,
        version: int,
        rules: EvaluationRules,
        stored: Iterable[SampleFact] = (),
        *,
        attempt: int = 0,
    ) -> None:
        self.version = version
        self._queries: dict[str, _Query] = {}
        self.is_admitted = False
        self._asked = False
        self._to_start: list[SampleId] = []
        batch = BatchId(version, attempt, evaluation=True)
        for ordinal in range(rules.num_queries):
            group_id = GroupId(batch, ordinal)
            spec = GroupSpec(group_id=str(group_id), ordinal=ordinal, query_index=ordinal)
            attempts = dict.fromkeys(rules.ordinals, 0)
            self._queries[str(group_id)] = _Query(spec, group_id, attempts)
        for fact in stored:
            self.sample_changed(fact)

    @property
    def done(self) -> bool:
        """Whether every sample has ended and its rows are known."""
        return all(query.rows is not None for query in self._queries.values())

    @property
    def num_open(self) -> int:
        """Samples that have not ended."""
        return sum(len(query.attempts) - len(query.ended) for query in self._queries.values())

    def open_samples(self) -> list[SampleId]:
        """Sample attempts that shall run."""
        return [
            SampleId(query.group_id, ordinal, attempt)
            for query in self._queries.values()
            for ordinal, attempt in query.attempts.items()
            if ordinal not in query.ended
        ]

    def admitted(self) -> None:
        """The store has the queries."""
        self.is_admitted = True
        self._to_start = self.open_samples()

    def take_startable(self) -> list[SampleId]:
        """Sample attempts that became due since the last call."""
        due, self._to_start = self._to_start, []
        return due

    def sample_changed(self, fact: SampleFact) -> None:
        """The store told of a sample; news of others is left aside."""
        sample_id = fact.sample_id
        query = self._queries.get(str(sample_id.group))
        if query is None or fact.status is SampleStatus.OPEN or sample_id.ordinal in query.ended:
            return
        if sample_id.attempt < query.attempts.get(sample_id.ordinal, 0):
            return
        if fact.status is SampleStatus.SUPERSEDED:
            query.attempts[sample_id.ordinal] = sample_id.attempt + 1
            again = SampleId(query.group_id, sample_id.ordinal, sample_id.attempt + 1)
            self._to_start.append(again)
        else:
            query.ended[sample_id.ordinal] = fact

    def rows_read(self, group_id: str, rows: tuple[Row, ...]) -> None:
        """The store told a query's rows."""
        self._queries[group_id].rows = rows

    def due(self) -> Iterator[AdmitGroups | ReadRows]:
        """What is to be done now."""
        if not self._asked:
            self._asked = True
            yield AdmitGroups(
                batch=self.version,
                groups=tuple(query.spec for query in self._queries.values()),
                reason=f"version {self.version} is to be evaluated",
            )
        for group_id, query in self._queries.items():
            if not query.reading and len(query.ended) == len(query.attempts):
                query.reading = True
                yield ReadRows(
                    batch=self.version, group_id=group_id, reason="its samples have ended"
                )

    def metrics(self) -> dict[str, float]:
        """Means over the samples that succeeded, by `eval/greedy/...` and `eval/sampled/...`."""
        values: dict[str, list[float]] = {}
        failed = 0
        for query in self._queries.values():
            for ordinal, fact in query.ended.items():
                if fact.status is not SampleStatus.DONE or fact.rewards is None:
                    failed += 1
                    continue
                kind = "sampled" if ordinal else "greedy"
                for name, value in _numbers(fact, query.rows or ()):
                    values.setdefault(f"eval/{kind}/{name}", []).append(value)
        means = {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}
        return {**means, "eval/num_failed": float(failed)}


def _numbers(fact: SampleFact, rows: Iterable[Row]) -> Iterator[tuple[str, float]]:
    rewards = fact.rewards
    assert rewards is not None, "a sample that is done has rewards"
    if rewards.team is not None:
        yield "team_reward", rewards.team
    for row in rows:
        reward = row_reward(rewards, row) if row.sample_id == str(fact.sample_id) else None
        if reward is not None:
            yield f"reward/{row.agent}", reward
    for name, value in rewards.metrics.items():
        yield f"metric/{name}", value
