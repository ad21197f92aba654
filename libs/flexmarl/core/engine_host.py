"""What an engine host does with its instances: start, load, restart, stop.

    planned -> STARTING -> EMPTY -> LOADING -> SERVING -> LOADING ...
                  ^                    |          |
                  +--- back-off <---- DEAD <------+      (the process ended, or took too long)

Invariants: an instance loads at most one thing at a time, always the newest order; a restarted
process is given the last order again without being asked (I11: it serves nothing until then); an
instance whose policies alone change keeps its process, and forgets what it was ordered to load; an
event of an earlier process of an instance changes nothing; every start and every load has a
deadline (I8), after which the process is killed and the restart follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import assert_never

from flexmarl.core.engine_host_events import (
    Effect,
    EngineEnded,
    EngineHostConfig,
    EngineReadied,
    Event,
    InstancePhase,
    InstanceView,
    InstanceWanted,
    LoadEnded,
    LoadEngine,
    LoadOrder,
    LoadOrdered,
    PlanReceived,
    Problem,
    ReportInstance,
    SetTimer,
    StartEngine,
    StopEngine,
    TimerFired,
)


@dataclass(slots=True)
class _Instance:
    wanted: InstanceWanted
    phase: InstancePhase = InstancePhase.STARTING
    generation: int = 0
    version: int = 0
    weights_hash: str = ""
    ordered: LoadOrder | None = None
    loading: LoadOrder | None = None
    load_id: int = 0
    deadline: float | None = None
    started_at: float = 0.0
    failures: int = 0
    restarts: int = 0
    problem: Problem | None = None


@dataclass(slots=True)
class EngineHost:
    """The instances of one host; see the module.

    Attributes:
        config: Times.
    """

    config: EngineHostConfig
    _run_id: str = ""
    _term: int = 0
    _generations: int = 0
    _timer: float | None = None
    _instances: dict[str, _Instance] = field(default_factory=dict)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take an event in; returns what to do about it.

        Args:
            event: What happened.
            now: Monotonic seconds.
        """
        effects: list[Effect] = []
        match event:
            case PlanReceived():
                self._on_plan(event, now, effects.append)
            case LoadOrdered():
                for instance_id in event.instance_ids:
                    self._on_order(instance_id, event.order, now, effects.append)
            case EngineReadied():
                self._on_ready(event, now, effects.append)
            case EngineEnded():
                self._on_ended(event, now, effects.append)
            case LoadEnded():
                self._on_load_ended(event, now, effects.append)
            case TimerFired():
                self._timer = None
                self._on_timer(now, effects.append)
            case _:
                assert_never(event)
        self._arm(effects.append)
        return effects

    @property
    def run_id(self) -> str:
        """Run of the newest plan; empty before the first."""
        return self._run_id

    def view(self, instance_id: str) -> InstanceView | None:
        """State of an instance; None when no plan has it."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return None
        return InstanceView(
            wanted=instance.wanted,
            phase=instance.phase,
            version=instance.version,
            weights_hash=instance.weights_hash,
            num_restarts=instance.restarts,
            problem=instance.problem,
        )

    def instance_ids(self) -> list[str]:
        """Ids of the planned instances, sorted."""
        return sorted(self._instances)

    def _on_plan(self, plan: PlanReceived, now: float, emit: Callable[[Effect], None]) -> None:
        if plan.run_id == self._run_id and plan.term < self._term:
            return  # an orchestrator that was replaced
        self._run_id, self._term = plan.run_id, plan.term
        wanted = {instance.instance_id: instance for instance in plan.instances}
        for instance_id in sorted(self._instances):
            instance = self._instances[instance_id]
            new = wanted.get(instance_id)
            if new is not None and replace(new, policies=()) == replace(
                instance.wanted, policies=()
            ):
                self._reassign(instance, new)
            else:
                del self._instances[instance_id]
                if instance.phase is not InstancePhase.DEAD:
                    emit(_stop(instance, "not_planned"))
        for instance_id in sorted(wanted):
            if instance_id not in self._instances:
                instance = self._instances[instance_id] = _Instance(wanted[instance_id])
                self._start(instance, now, emit, reason="planned")

    def _reassign(self, instance: _Instance, wanted: InstanceWanted) -> None:
        """The same engine under other policies: what it was told to load is none of theirs."""
        instance.wanted = wanted
        if instance.ordered is not None and instance.ordered.policy not in wanted.policies:
            instance.ordered = None

    def _on_order(
        self, instance_id: str, order: LoadOrder, now: float, emit: Callable[[Effect], None]
    ) -> None:
        instance = self._instances.get(instance_id)
        if instance is None or order.policy not in instance.wanted.policies:
            return  # ordered before a plan took the instance away
        instance.ordered = order
        if instance.phase in (InstancePhase.EMPTY, InstancePhase.SERVING):
            self._load(instance, now, emit)

    def _on_ready(self, event: EngineReadied, now: float, emit: Callable[[Effect], None]) -> None:
        instance = self._current(event.instance_id, event.generation)
        if instance is None or instance.phase is not InstancePhase.STARTING:
            return
        instance.phase, instance.deadline = InstancePhase.EMPTY, None
        instance.problem = None
        if instance.ordered is not None:
            self._load(instance, now, emit)
        else:
            emit(ReportInstance(event.instance_id))

    def _on_ended(self, event: EngineEnded, now: float, emit: Callable[[Effect], None]) -> None:
        instance = self._current(event.instance_id, event.generation)
        if instance is None or instance.phase is InstancePhase.DEAD:
            return
        if now - instance.started_at >= self.config.stable_s:
            instance.failures = 0
        delay_s = self.config.backoff_initial_s * 2.0**instance.failures
        instance.failures += 1
        instance.phase, instance.problem = InstancePhase.DEAD, event.problem
        instance.version, instance.weights_hash, instance.loading = 0, "", None
        instance.deadline = now + min(delay_s, self.config.backoff_max_s)
        emit(ReportInstance(event.instance_id))

    def _on_load_ended(self, event: LoadEnded, now: float, emit: Callable[[Effect], None]) -> None:
        instance = self._current(event.instance_id, event.generation)
        if instance is None or instance.loading is None or event.load_id != instance.load_id:
            return
        order, instance.loading, instance.deadline = instance.loading, None, None
        instance.problem = event.problem
        if event.problem is None:
            instance.version, instance.weights_hash = order.version, order.weights_hash
        # After a refusal what was served before is served on.
        served = bool(instance.weights_hash)
        instance.phase = InstancePhase.SERVING if served else InstancePhase.EMPTY
        emit(ReportInstance(event.instance_id))
        if instance.ordered not in (order, None):
            self._load(instance, now, emit)

    def _on_timer(self, now: float, emit: Callable[[Effect], None]) -> None:
        for instance_id in sorted(self._instances):
            instance = self._instances[instance_id]
            if instance.deadline is None or instance.deadline > now:
                continue
            instance.deadline = None
            if instance.phase is InstancePhase.DEAD:
                instance.restarts += 1
                self._start(instance, now, emit, reason="restart")
            else:
                emit(_stop(instance, f"{instance.phase.value}_took_too_long"))

    def _start(
        self, instance: _Instance, now: float, emit: Callable[[Effect], None], *, reason: str
    ) -> None:
        self._generations += 1
        instance.generation = self._generations
        instance.phase = InstancePhase.STARTING
        instance.started_at = now
        instance.deadline = now + self.config.start_timeout_s
        emit(StartEngine(wanted=instance.wanted, generation=instance.generation, reason=reason))
        emit(ReportInstance(instance.wanted.instance_id))

    def _load(self, instance: _Instance, now: float, emit: Callable[[Effect], None]) -> None:
        order = instance.ordered
        assert order is not None, "callers checked that there is an order"
        if (order.version, order.weights_hash) == (instance.version, instance.weights_hash):
            emit(ReportInstance(instance.wanted.instance_id))  # asked for what it serves
            return
        instance.phase, instance.loading = InstancePhase.LOADING, order
        instance.load_id += 1
        instance.deadline = now + self.config.load_timeout_s
        emit(
            LoadEngine(
                instance_id=instance.wanted.instance_id,
                generation=instance.generation,
                load_id=instance.load_id,
                order=order,
                run_id=instance.wanted.run_id,
                fetch=order.weights_hash != instance.weights_hash,
            )
        )
        emit(ReportInstance(instance.wanted.instance_id))

    def _current(self, instance_id: str, generation: int) -> _Instance | None:
        instance = self._instances.get(instance_id)
        return instance if instance is not None and instance.generation == generation else None

    def _arm(self, emit: Callable[[Effect], None]) -> None:
        deadlines = [i.deadline for i in self._instances.values() if i.deadline is not None]
        wanted = min(deadlines, default=None)
        if wanted is not None and wanted != self._timer:
            self._timer = wanted
            emit(SetTimer(wanted))


def _stop(instance: _Instance, reason: str) -> StopEngine:
    return StopEngine(
        instance_id=instance.wanted.instance_id, generation=instance.generation, reason=reason
    )
