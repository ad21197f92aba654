"""The numbers of one version, as a person and `metrics.jsonl` see them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flexmarl.api.orchestrator.v1 import orchestrator_pb2

AGENT_PREFIX = "reward/"
STEP_PREFIX = "step/"
UTILISATION_PREFIX = "utilisation/"
TOKENS_PREFIX = "tokens_per_s/"
EVALUATION_PREFIX = "eval/"
ALARM_PREFIX = "alarm/"

_ALARMS = {
    "zero_rewards": "every reward is 0 ({:.0f} samples): look at what the reward function is "
    "given; if that is right, the task is too hard for a start: reward parts of it",
    "reward_failures": "the reward function failed on {:.0f} sample(s)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionNumbers:
    """One committed version's account.

    Attributes:
        version: Version whose samples these are.
        metrics: Numbers by name; what is not finite is left out.
        num_groups: Groups that were trained on, and dropped.
        consumed: Rows in the update, by policy.
        voided: Rows not trained on, by policy and reason.
        committed_unix_ns: Time of the commit that ended the batch.
    """

    version: int
    metrics: Mapping[str, float]
    num_groups: tuple[int, int]
    consumed: Mapping[str, int]
    voided: Mapping[str, Mapping[str, int]]
    committed_unix_ns: int

    @property
    def team_reward(self) -> float | None:
        """Mean team reward of the batch."""
        return self.metrics.get("team_reward")

    @property
    def is_trained(self) -> bool:
        """Whether a batch was trained on; the last version may be evaluated only."""
        return self.committed_unix_ns > 0

    @property
    def step_s(self) -> float | None:
        """Seconds from the batch's start to its hand-over."""
        return self.metrics.get("step_s")

    @property
    def step_parts(self) -> dict[str, float]:
        """Seconds of the step by part."""
        return {
            name.removesuffix("_s").replace("_", " "): value
            for name, value in self.under(STEP_PREFIX).items()
        }

    @property
    def num_voided(self) -> int:
        """Rows not trained on."""
        return sum(sum(reasons.values()) for reasons in self.voided.values())

    @property
    def idle(self) -> list[str]:
        """Policies that had rows and trained on none of them, each with why."""
        lines = []
        for policy, reasons in sorted(self.voided.items()):
            if reasons and not self.consumed.get(policy):
                why = ", ".join(f"{name} {count}" for name, count in sorted(reasons.items()))
                lines.append(f"{policy} ({why})")
        return lines

    @property
    def alarms(self) -> list[str]:
        """What a person should look at."""
        found = self.under(ALARM_PREFIX)
        return [_ALARMS.get(name, name + ": {:g}").format(found[name]) for name in found]

    def under(self, prefix: str) -> dict[str, float]:
        """Metrics below a prefix, without it, sorted by name."""
        return {
            name.removeprefix(prefix): value
            for name, value in sorted(self.metrics.items())
            if name.startswith(prefix)
        }

    def scalars(self) -> dict[str, float]:
        """All numbers by name, as trackers take them."""
        found = self.to_json().items()
        counts = {k: float(v) for k, v in found if isinstance(v, int | float)}
        return {k: v for k, v in counts.items() if k not in ("version", "committed_unix_ns")}

    def to_json(self) -> dict[str, object]:
        """One object of `metrics.jsonl`."""
        return {
            "version": self.version,
            **{name: self.metrics[name] for name in sorted(self.metrics)},
            "groups_closed": self.num_groups[0],
            "groups_dropped": self.num_groups[1],
            **{f"rows_consumed/{name}": count for name, count in sorted(self.consumed.items())},
            **{f"rows_void/{name}": sum(r.values()) for name, r in sorted(self.voided.items())},
            **{
                f"rows_void/{name}/{reason}": count
                for name, reasons in sorted(self.voided.items())
                for reason, count in sorted(reasons.items())
            },
            "committed_unix_ns": self.committed_unix_ns,
        }


def numbers_of(report: orchestrator_pb2.VersionReport) -> VersionNumbers:
    """Reads a report; JSON and plots know no infinities, so those numbers are left out."""
    batch = report.batch
    policies = {name: counts for name, counts in batch.policies.items() if name}
    return VersionNumbers(
        version=report.version,
        metrics={name: value for name, value in batch.metrics.items() if math.isfinite(value)},
        num_groups=(batch.num_groups_closed, batch.num_groups_dropped),
        consumed={name: counts.consumed for name, counts in policies.items()},
        voided={name: dict(counts.voided) for name, counts in policies.items()},
        committed_unix_ns=report.committed_unix_ns,
    )
