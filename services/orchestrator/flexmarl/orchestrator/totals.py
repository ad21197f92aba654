"""Running sums of an orchestrator since its start, over all runs that it drove."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from flexmarl.api.meg_store.v1.graph_pb2 import BatchRecord

_STEP: Final = "step/"
_TOKENS: Final = "tokens/"
_FAILURES: Final = "sample_failures/"
_ALARM: Final = "alarm/"


@dataclass(slots=True)
class Totals:
    """See the module; a batch counts once it is committed.

    Attributes:
        steps: Committed batches.
        step_s: Seconds of their steps, by part.
        tokens: Tokens, by what was done with them.
        rows: Rows of trained policies, by policy and fate.
        void: Void rows, by policy and reason.
        groups: Groups, by how they ended.
        sample_failures: Failed samples, by reason.
        alarms: Batches with an alarm, by its name and policy ("" for the team's).
        effect_failures: Effects that failed, by kind and reason.
        newest: Numbers of the newest batch, by their names in `metrics.jsonl`.
    """

    steps: int = 0
    step_s: dict[str, float] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    rows: Counter[tuple[str, str]] = field(default_factory=Counter)
    void: Counter[tuple[str, str]] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)
    sample_failures: Counter[str] = field(default_factory=Counter)
    alarms: Counter[tuple[str, str]] = field(default_factory=Counter)
    effect_failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    newest: Mapping[str, float] = field(default_factory=dict)

    def committed(self, batch: BatchRecord) -> None:
        """A batch was committed."""
        self.steps += 1
        self.groups["closed"] += batch.num_groups_closed
        self.groups["dropped"] += batch.num_groups_dropped
        for policy, counts in batch.policies.items():
            if policy:
                self.rows[policy, "consumed"] += counts.consumed
                for reason, count in counts.voided.items():
                    self.rows[policy, "void"] += count
                    self.void[policy, reason] += count
        self.newest = dict(batch.metrics)
        for name, value in self.newest.items():
            self._add(name, value)

    def _add(self, name: str, value: float) -> None:
        if name.startswith(_STEP):
            part = name.removeprefix(_STEP).removesuffix("_s")
            self.step_s[part] = self.step_s.get(part, 0.0) + value
        elif name.startswith(_TOKENS):
            self.tokens[name.removeprefix(_TOKENS)] += round(value)
        elif name.startswith(_FAILURES):
            self.sample_failures[name.removeprefix(_FAILURES)] += round(value)
        elif name.startswith(_ALARM):
            policy, _, alarm = name.removeprefix(_ALARM).rpartition("/")
            self.alarms[alarm, policy] += 1
