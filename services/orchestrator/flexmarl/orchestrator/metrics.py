"""What an orchestrator exposes to Prometheus: where its run stands, and sums over its batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from flexmarl.api.common.v1.common_pb2 import RunStatus
from flexmarl.api.orchestrator.v1.orchestrator_pb2 import RunProgress
from flexmarl.orchestrator.totals import Totals
from flexmarl.runtime.metrics import MetricSpec, Reading, counter, gauge

RUN: Final = gauge(
    "flexmarl_orchestrator_run",
    "1 for the newest run, its state, and the stage of its open batch.",
    "run",
    "status",
    "stage",
)
VERSION: Final = gauge("flexmarl_orchestrator_version", "Newest committed version of the run.")
VERSIONS: Final = gauge("flexmarl_orchestrator_versions", "Versions that the run shall reach.")
SAMPLES: Final = gauge(
    "flexmarl_orchestrator_batch_samples", "Samples of the open batch: open or ended.", "state"
)
ROWS_WAITING: Final = gauge(
    "flexmarl_orchestrator_rows_waiting", "Rows released and not yet in a sum.", "policy"
)
WAIT: Final = gauge(
    "flexmarl_orchestrator_wait_seconds",
    "The longest present wait on rollout, store, trainer, instance or policy; "
    "`flexmarl why` says what for and what would end it.",
    "on",
)
STEPS: Final = counter("flexmarl_orchestrator_steps_total", "Committed batches.")
STEP_SECONDS: Final = counter(
    "flexmarl_orchestrator_step_seconds_total",
    "Seconds of their steps, by part: commit, hand_over, rollout, training_tail.",
    "part",
)
TOKENS: Final = counter(
    "flexmarl_orchestrator_tokens_total", "Tokens of committed batches: sampled, trained.", "kind"
)
ROWS: Final = counter(
    "flexmarl_orchestrator_rows_total",
    "Rows of committed batches: consumed by an update, or void.",
    "policy",
    "fate",
)
ROWS_VOID: Final = counter(
    "flexmarl_orchestrator_rows_void_total", "Void rows, by reason.", "policy", "reason"
)
GROUPS: Final = counter(
    "flexmarl_orchestrator_groups_total", "Groups of committed batches: closed, dropped.", "end"
)
SAMPLE_FAILURES: Final = counter(
    "flexmarl_orchestrator_sample_failures_total", "Failed samples, by reason.", "reason"
)
EFFECT_FAILURES: Final = counter(
    "flexmarl_orchestrator_effect_failures_total",
    "Work given to other services that failed, by kind and reason; most of it is given again.",
    "effect",
    "reason",
)
ALARMS: Final = counter(
    "flexmarl_orchestrator_alarms_total",
    "Batches with an alarm: zero_rewards, reward_failures, ratio, non_finite, weights_unchanged; "
    "the policy is empty where it concerns the team.",
    "alarm",
    "policy",
)
TEAM_REWARD: Final = gauge(
    "flexmarl_orchestrator_team_reward", "Mean team reward of the newest batch."
)
AGENT_REWARD: Final = gauge(
    "flexmarl_orchestrator_agent_reward", "Mean reward of an agent in the newest batch.", "agent"
)
UTILISATION: Final = gauge(
    "flexmarl_orchestrator_utilisation",
    "Busy share of the newest step: of instances (rollout), of slots (trainer).",
    "of",
)
LOGPROB_GAP: Final = gauge(
    "flexmarl_orchestrator_logprob_gap",
    "Mean distance of log-probabilities between trainer and engine in the newest batch, in nats.",
    "policy",
)
LOGPROB_OUTSIDE: Final = gauge(
    "flexmarl_orchestrator_logprob_outside",
    "Share of tokens whose ratio trainer / engine is outside [0.9, 1.1].",
    "policy",
)
GRAD_NORM: Final = gauge(
    "flexmarl_orchestrator_grad_norm", "Gradient norm before clipping, newest update.", "policy"
)
ENTROPY: Final = gauge(
    "flexmarl_orchestrator_entropy",
    "Mean entropy per token in the newest batch, in nats.",
    "policy",
)

METRICS: Final = (
    RUN,
    VERSION,
    VERSIONS,
    SAMPLES,
    ROWS_WAITING,
    WAIT,
    STEPS,
    STEP_SECONDS,
    TOKENS,
    ROWS,
    ROWS_VOID,
    GROUPS,
    SAMPLE_FAILURES,
    EFFECT_FAILURES,
    ALARMS,
    TEAM_REWARD,
    AGENT_REWARD,
    UTILISATION,
    LOGPROB_GAP,
    LOGPROB_OUTSIDE,
    GRAD_NORM,
    ENTROPY,
)

_OF_UPDATES: Final = {
    "logprob_gap": LOGPROB_GAP,
    "logprob_outside": LOGPROB_OUTSIDE,
    "grad_norm": GRAD_NORM,
    "entropy": ENTROPY,
}


def readings(progress: RunProgress | None, totals: Totals) -> Iterator[Reading]:
    """All values now.

    Args:
        progress: Of the newest run.
        totals: Running sums.
    """
    if progress is not None:
        yield from _present(progress)
    yield from _sums(totals)
    yield from _newest(totals)


def _present(progress: RunProgress) -> Iterator[Reading]:
    status = RunStatus.Name(progress.status).removeprefix("RUN_STATUS_").lower()
    yield RUN.read(1, progress.run_id, status, progress.stage)
    yield VERSION.read(progress.version)
    yield VERSIONS.read(progress.num_versions)
    yield SAMPLES.read(progress.num_samples - progress.num_samples_ended, "open")
    yield SAMPLES.read(progress.num_samples_ended, "ended")
    for policy, rows in progress.rows_waiting.items():
        yield ROWS_WAITING.read(rows, policy)
    longest: dict[str, float] = {}
    for wait in progress.reasons:
        on = wait.what.partition(" ")[0].rstrip(":")
        longest[on] = max(longest.get(on, 0.0), wait.waited_ms / 1e3)
    for on, waited_s in longest.items():
        yield WAIT.read(waited_s, on)


def _sums(totals: Totals) -> Iterator[Reading]:
    yield STEPS.read(totals.steps)
    for part, seconds in totals.step_s.items():
        yield STEP_SECONDS.read(seconds, part)
    for spec, counts in (
        (TOKENS, totals.tokens),
        (GROUPS, totals.groups),
        (SAMPLE_FAILURES, totals.sample_failures),
    ):
        for name, count in counts.items():
            yield spec.read(count, name)
    for spec, pairs in (
        (ROWS, totals.rows),
        (ROWS_VOID, totals.void),
        (ALARMS, totals.alarms),
        (EFFECT_FAILURES, totals.effect_failures),
    ):
        for key, count in pairs.items():
            yield spec.read(count, *key)


def _newest(totals: Totals) -> Iterator[Reading]:
    for name, value in totals.newest.items():
        found = _named(name)
        if found is not None and math.isfinite(value):
            spec, labels = found
            yield spec.read(value, *labels)


def _named(name: str) -> tuple[MetricSpec, tuple[str, ...]] | None:
    """The metric and labels of a batch's number, if it is exposed."""
    if name == "team_reward":
        return TEAM_REWARD, ()
    kind, _, rest = name.partition("/")
    if kind == "reward":
        return AGENT_REWARD, (rest,)
    if kind == "utilisation":
        return UTILISATION, (rest,)
    if kind == "train":
        policy, _, measure = rest.partition("/")
        spec = _OF_UPDATES.get(measure)
        return None if spec is None else (spec, (policy,))
    return None
