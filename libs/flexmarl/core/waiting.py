"""Why a run does not go on: what it waits for, since when, and what would end the wait (I8).

The longest wait comes first. A cause is named beside its effect: open samples wait for an engine,
and an engine that has requests and ends none of them is a line of its own, with its process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from flexmarl.core.policy_training import PolicyTraining
from flexmarl.core.run import RunCore
from flexmarl.core.run_effects import (
    ActivateVersion,
    Apply,
    Bind,
    CancelSamples,
    Compute,
    ComputeAdvantages,
    OpenRollout,
    OpenTrainer,
    Prefetch,
    PrepareWeights,
    SaveGradients,
    StartSamples,
    Suspend,
    Work,
)

QUIET_S: Final = 1.0
"""An instance that ended a request so recently is at work, and no cause of a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait.

    Attributes:
        what: What is waited for.
        for_s: Since how many seconds.
        ends: What would end it.
    """

    what: str
    for_s: float
    ends: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSight:
    """An instance, as its dispatcher sees it.

    Attributes:
        instance_id: Its id.
        host_id: Engine host that runs it.
        pid: Process of its engine; 0 when there is none.
        policies: Policies that it serves.
        state: "serving", or what keeps it from that.
        num_running: Requests that it has.
        silent_s: Since when it neither ended a request nor changed its state.
    """

    instance_id: str
    host_id: str
    pid: int
    policies: tuple[str, ...]
    state: str
    num_running: int
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Configured times after which waits end by themselves, in seconds."""

    store_patience_s: float
    service_patience_s: float
    operation_timeout_s: float
    sample_timeout_s: float
    call_timeout_s: Mapping[str, float]


def explain(
    core: RunCore, *, instances: Iterable[InstanceSight], bounds: Bounds, now: float
) -> list[Wait]:
    """What a run waits for, the longest wait first.

    Args:
        core: The run.
        instances: Its instances.
        bounds: Configured times.
        now: On the clock of the core's events.
    """
    if core.ended is not None:
        return []
    waits = [
        Wait(what=effect.waits, for_s=now - since, ends=_end_of(effect, bounds))
        for effect, since in core.in_flight
    ]
    evaluating = 0 if core.evaluation is None else core.evaluation.num_open
    if core.num_running or evaluating:
        waits.append(_open_samples(core, evaluating, bounds, now))
        waits.extend(_engines(instances, bounds))
    waits.extend(_slots(core, now))
    for name, at in core.timers.items():
        ends = f"it fires in {max(at - now, 0.0):.1f} s"
        waits.append(Wait(what=f"timer {name}", for_s=0.0, ends=ends))
    return sorted(waits, key=lambda wait: -wait.for_s)


def _open_samples(core: RunCore, evaluating: int, bounds: Bounds, now: float) -> Wait:
    parts = []
    if core.batch is not None and core.num_running:
        parts.append(f"{core.num_running} open sample(s) of batch {core.batch.number}")
    if evaluating:
        parts.append(f"{evaluating} sample(s) of the evaluation of version {core.version}")
    return Wait(
        what=f"rollout: {' and '.join(parts)}",
        for_s=now - core.sample_heard_at,
        ends=(
            "the next sample that ends; each has workflow.sample_timeout_s = "
            f"{bounds.sample_timeout_s:g}, then it fails and batch.on_sample_failure applies"
        ),
    )


def _engines(instances: Iterable[InstanceSight], bounds: Bounds) -> Iterator[Wait]:
    for instance in instances:
        if instance.silent_s < QUIET_S:
            continue
        who = f"instance {instance.instance_id} of {', '.join(instance.policies)}"
        if instance.pid:
            who += f" (engine process {instance.pid} on {instance.host_id})"
        if instance.state != "serving":
            yield Wait(
                what=f"{who}: it is {instance.state}",
                for_s=instance.silent_s,
                ends="it serves; its engine host ends and restarts it when that takes too long",
            )
        elif instance.num_running:
            timeout_s = max((bounds.call_timeout_s[name] for name in instance.policies), default=0)
            yield Wait(
                what=f"{who}: {instance.num_running} request(s), and none ended",
                for_s=instance.silent_s,
                ends=(
                    "its next answer, or its death; each call has agents.<agent>.timeout_s, at "
                    f"most {timeout_s:g}, then it fails"
                ),
            )


def _slots(core: RunCore, now: float) -> Iterator[Wait]:
    holders = [policy.name for policy in core.training.policies.values() if policy.binding]
    for policy in core.training.policies.values():
        if policy.binding is not None or policy.work_since is None:
            continue
        aim = f"{policy.work:g} tokens of ready work" if policy.has_state else "its first state"
        yield Wait(
            what=f"policy {policy.name}: trainer slots for {aim}",
            for_s=now - policy.work_since,
            ends=_end_of_queue(policy, holders),
        )


def _end_of_queue(policy: PolicyTraining, holders: list[str]) -> str:
    if policy.retry_at is not None:
        return f"another try, after {policy.failures} failure(s) in a row"
    if not holders:
        return "a trainer that opens the run"
    return f"free slots; bound now: {', '.join(holders)}"


def _end_of(effect: Work, bounds: Bounds) -> str:
    match effect:
        case Bind() | Compute() | Apply() | SaveGradients() | Suspend():
            return (
                f"the answer of the trainer at {effect.trainer}; after operation_timeout_s = "
                f"{bounds.operation_timeout_s:g} or a rank's death the policy is bound anew"
            )
        case Prefetch():
            return (
                f"the answer of the trainer at {effect.trainer}; after operation_timeout_s = "
                f"{bounds.operation_timeout_s:g} its binding loads the state"
            )
        case OpenTrainer():
            return (
                f"the answer of the trainer at {effect.trainer}; after service_patience_s = "
                f"{bounds.service_patience_s:g} the run fails, resumable"
            )
        case (
            OpenRollout()
            | StartSamples()
            | CancelSamples()
            | ComputeAdvantages()
            | PrepareWeights()
            | ActivateVersion()
        ):
            return (
                "the dispatcher's answer; after service_patience_s = "
                f"{bounds.service_patience_s:g} the run fails, resumable"
            )
        case _:
            return (
                "the store's answer; after store_patience_s = "
                f"{bounds.store_patience_s:g} the run fails, resumable"
            )
