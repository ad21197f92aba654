"""A run's status, as people and the orchestrator see it."""

from __future__ import annotations

import asyncio
import time

from flexmarl.api.rollout.v1.engine_pb2 import InstanceStatus
from flexmarl.api.rollout.v1.rollout_pb2 import QueueStatus, RolloutStatus
from flexmarl.rollout.dispatcher.run import Run


def run_status(run: Run, incarnation: str) -> RolloutStatus:
    """The status now."""
    waits = run.waits()
    status = RolloutStatus(
        incarnation=incarnation,
        ready=not waits and run.fatal is None,
        version=max(run.version, 0),
        num_open_samples=len(run.flow),
        instances=instance_statuses(run),
        counters=_counters(run),
        waits=waits,
        unix_ns=time.time_ns(),
        fatal=run.fatal,
    )
    for policy in run.config.policies:
        book = run.desk.book(policy)
        status.queues[policy].CopyFrom(
            QueueStatus(num_waiting=book.num_waiting, num_running=book.num_running)
        )
    return status


def _counters(run: Run) -> dict[str, float]:
    """Sums of what is counted by kind, too."""
    sums = {"moves": run.mover.moves.total(), "failures": run.desk.failures.total()}
    return {name: float(count) for name, count in {**run.desk.counters, **sums}.items()}


def instance_statuses(run: Run) -> list[InstanceStatus]:
    """Instances with what the dispatcher knows better than their hosts."""
    now = asyncio.get_running_loop().time()
    statuses: list[InstanceStatus] = []
    for instance in run.fleet.instances:
        status = InstanceStatus()
        status.CopyFrom(instance.status)
        status.instance_id = instance.instance_id
        status.host_id = instance.host_id
        del status.policies[:]
        status.policies.extend(instance.spec.policies)
        status.num_running = run.desk.num_at(instance.instance_id)
        status.silent_ms = int(instance.silent_s(now) * 1e3)
        status.busy_fraction = instance.take_busy_fraction(now)
        statuses.append(status)
    return statuses
