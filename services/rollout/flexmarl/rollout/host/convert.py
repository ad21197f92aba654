"""Between messages and the words of `core.engine_host`."""

from __future__ import annotations

from typing import Final

from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.rollout.v1.engine_pb2 import (
    INSTANCE_STATE_DEAD,
    INSTANCE_STATE_EMPTY,
    INSTANCE_STATE_LOADING,
    INSTANCE_STATE_SERVING,
    INSTANCE_STATE_STARTING,
    InstancePlan,
    InstanceState,
    InstanceStatus,
    LoadWeights,
)
from flexmarl.core.engine_host_events import (
    InstancePhase,
    InstanceView,
    InstanceWanted,
    LoadOrder,
    LoadOrdered,
    PlanReceived,
    Problem,
)
from flexmarl.core.errors import DomainError

_STATES: Final[dict[InstancePhase, InstanceState.ValueType]] = {
    InstancePhase.STARTING: INSTANCE_STATE_STARTING,
    InstancePhase.EMPTY: INSTANCE_STATE_EMPTY,
    InstancePhase.LOADING: INSTANCE_STATE_LOADING,
    InstancePhase.SERVING: INSTANCE_STATE_SERVING,
    InstancePhase.DEAD: INSTANCE_STATE_DEAD,
}


def plan_received(plan: InstancePlan) -> PlanReceived:
    """The event of a plan."""
    return PlanReceived(
        run_id=plan.run_id,
        term=plan.term,
        instances=tuple(
            InstanceWanted(
                instance_id=spec.instance_id,
                run_id=plan.run_id,
                policies=tuple(spec.policies),
                engine=spec.engine,
                model_path=spec.model_path,
                model_hash=spec.model_hash,
                max_concurrency=spec.max_concurrency,
                dtype=spec.dtype,
                max_context=spec.max_context,
                options=spec.options.SerializeToString(deterministic=True),
            )
            for spec in plan.instances
        ),
    )


def load_ordered(load: LoadWeights) -> LoadOrdered:
    """The event of a load."""
    return LoadOrdered(
        instance_ids=tuple(load.instance_ids),
        order=LoadOrder(
            policy=load.policy,
            version=load.version,
            weights_hash=load.weights_hash,
            key=load.weights.key,
        ),
    )


def instance_status(
    view: InstanceView, *, host_id: str, pid: int, num_running: int
) -> InstanceStatus:
    """The message about an instance."""
    status = InstanceStatus(
        instance_id=view.wanted.instance_id,
        host_id=host_id,
        policies=view.wanted.policies,
        state=_STATES[view.phase],
        version=view.version,
        weights_hash=view.weights_hash,
        num_running=num_running,
        pid=pid,
        num_restarts=view.num_restarts,
    )
    if view.problem is not None:
        status.failure.reason = view.problem.reason
        status.failure.message = view.problem.message
    return status


def problem_of(failure: Failure) -> Problem:
    """What an engine said."""
    return Problem(failure.reason, failure.message)


def problem_of_error(error: DomainError) -> Problem:
    """What went wrong here."""
    return Problem(error.reason.value, error.message)
