"""What a person sees of a run."""

from __future__ import annotations

from flexmarl.api.orchestrator.v1alpha1 import orchestrator_pb2 as pb
from flexmarl.core.run import RunCore
from flexmarl.orchestrator.context import RunContext


def describe(progress: pb.RunProgress, context: RunContext, core: RunCore) -> None:
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
    waits = [] if core.ended is not None else core.waits()
    status = context.rollout_status
    if status is not None:
        for name, queue in status.queues.items():
            progress.queues[name].CopyFrom(queue)
        progress.instances.extend(status.instances)
        waits.extend(status.waits)
    for trainer in context.trainer_status.values():
        progress.slots.extend(trainer.slots)
    progress.waits.extend(waits)
