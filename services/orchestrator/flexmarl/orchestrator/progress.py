"""What a person sees of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from flexmarl.api.orchestrator.v1 import orchestrator_pb2 as pb
from flexmarl.api.rollout.v1 import engine_pb2
from flexmarl.core.run import RunCore
from flexmarl.core.waiting import Bounds, InstanceSight, explain
from flexmarl.orchestrator.config import OrchestratorConfig
from flexmarl.orchestrator.context import RunContext
from flexmarl.runtime.run_config import RunConfig

_STATES: Final = {
    engine_pb2.INSTANCE_STATE_STARTING: "starting",
    engine_pb2.INSTANCE_STATE_EMPTY: "without weights",
    engine_pb2.INSTANCE_STATE_LOADING: "loading weights",
    engine_pb2.INSTANCE_STATE_SERVING: "serving",
    engine_pb2.INSTANCE_STATE_DEAD: "dead",
}


def bounds_of(config: OrchestratorConfig, run: RunConfig) -> Bounds:
    """After what times the waits of a run end by themselves."""
    calls: dict[str, float] = {}
    for agent in run.agents.values():
        calls[agent.policy] = max(calls.get(agent.policy, 0.0), agent.timeout_s)
    return Bounds(
        store_patience_s=config.store_patience_s,
        service_patience_s=config.service_patience_s,
        operation_timeout_s=config.operation_timeout_s,
        sample_timeout_s=run.workflow.sample_timeout_s,
        call_timeout_s=calls,
    )


def describe(
    progress: pb.RunProgress, context: RunContext, core: RunCore, *, bounds: Bounds
) -> None:
    """Fills in where the run stands."""
    progress.version = core.version or 0
    progress.stage = core.stage
    batch = core.batch
    if batch is not None:
        progress.num_groups = batch.num_admitted
        progress.num_groups_closed = batch.num_terminal
        progress.num_samples = batch.num_samples
        progress.num_samples_ended = batch.num_samples_ended
    for policy in core.training.trained:
        progress.rows_waiting[policy.name] = policy.rows_waiting
    status = context.rollout_status
    if status is not None:
        for name, queue in status.queues.items():
            progress.queues[name].CopyFrom(queue)
        progress.instances.extend(status.instances)
    for trainer in context.trainer_status.values():
        progress.slots.extend(trainer.slots)
    if core.ended is not None:
        return  # what the services waited for last holds nobody any more
    progress.waits.extend(core.waits())
    if status is not None:
        progress.waits.extend(status.waits)
    now = time.monotonic()
    for wait in explain(core, instances=_instances(context), bounds=bounds, now=now):
        waited_ms = max(int(wait.for_s * 1e3), 0)
        progress.reasons.add(what=wait.what, waited_ms=waited_ms, ends=wait.ends)


def _instances(context: RunContext) -> Iterator[InstanceSight]:
    status = context.rollout_status
    for instance in () if status is None else status.instances:
        yield InstanceSight(
            instance_id=instance.instance_id,
            host_id=instance.host_id,
            pid=instance.pid,
            policies=tuple(instance.policies),
            state=_STATES.get(instance.state, "not heard of"),
            num_running=instance.num_running,
            silent_s=instance.silent_ms / 1e3,
        )
