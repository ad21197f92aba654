"""Executes what `core.engine_host` decides: starts, loads and stops engine processes."""

from __future__ import annotations

import asyncio
import time
from typing import assert_never

from flexmarl.api.rollout.v1.engine_pb2 import (
    EngineEvent,
    EngineLoaded,
    InstancePlan,
    InstanceStatus,
    LoadWeights,
)
from flexmarl.client.segments import SegmentReader
from flexmarl.core.engine_host import EngineHost
from flexmarl.core.engine_host_events import (
    Effect,
    EngineEnded,
    EngineReadied,
    Event,
    InstancePhase,
    LoadEnded,
    LoadEngine,
    Problem,
    ReportInstance,
    SetTimer,
    StartEngine,
    StopEngine,
    TimerFired,
)
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.silence import Verdict, judge_silence
from flexmarl.rollout.host.attempts import AttemptBook
from flexmarl.rollout.host.convert import (
    instance_status,
    load_ordered,
    plan_received,
    problem_of,
    problem_of_error,
)
from flexmarl.rollout.host.engine_process import EngineProcess
from flexmarl.rollout.host.launcher import Launcher
from flexmarl.rollout.host.outbox import Outbox
from flexmarl.rollout.host.requests import RequestRouter
from flexmarl.rollout.host.store_access import StoreAccess
from flexmarl.runtime.aio import Background
from flexmarl.runtime.logging import get_logger

_log = get_logger(__name__)


class InstanceDriver:
    """Driver of the core: the only reader of its clock.

    Args:
        host_id: Name of this host.
        core: Decides.
        book: Attempts.
        outbox: Where statuses and results go.
        store: Models and weights.
        launcher: Starts processes.
        background: Owns tasks.
    """

    def __init__(
        self,
        *,
        host_id: str,
        core: EngineHost,
        book: AttemptBook,
        outbox: Outbox,
        store: StoreAccess,
        launcher: Launcher,
        background: Background,
    ) -> None:
        self.router = RequestRouter(book=book, outbox=outbox, find_engine=self._find_engine)
        self._host_id = host_id
        self._core = core
        self._book = book
        self._outbox = outbox
        self._store = store
        self._launcher = launcher
        self._background = background
        self._engines: dict[str, EngineProcess] = {}
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._leases: dict[tuple[int, str], SegmentReader] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def run_id(self) -> str:
        """Run of the newest plan; empty before the first."""
        return self._core.run_id

    def statuses(self) -> list[InstanceStatus]:
        """All planned instances."""
        statuses = (self._status(instance_id) for instance_id in self._core.instance_ids())
        return [status for status in statuses if status is not None]

    async def plan(self, plan: InstancePlan) -> None:
        """Have these instances from now on."""
        await self._store.use(list(plan.shards))
        self._handle(plan_received(plan))
        for spec in plan.instances:
            if engine := self._engines.get(spec.instance_id):
                engine.policies = tuple(spec.policies)

    def load(self, load: LoadWeights) -> None:
        """Make instances take weights over."""
        self._handle(load_ordered(load))

    async def watch_silence(self, silence_s: float) -> None:
        """End engines that hang; runs until cancelled. Their attempts fail and go elsewhere."""
        while True:
            await asyncio.sleep(silence_s / 16)
            for engine in list(self._engines.values()):
                if self._book.num_running_on(engine.instance_id) and self._serves(engine):
                    self._judge(engine, silence_s)

    def _serves(self, engine: EngineProcess) -> bool:
        """Whether it is not busy with what has a deadline of its own: starting, loading."""
        view = self._core.view(engine.instance_id)
        return view is not None and view.phase is InstancePhase.SERVING

    def _judge(self, engine: EngineProcess, silence_s: float) -> None:
        verdict = judge_silence(
            heard_at=engine.heard_at,
            asked_at=engine.asked_at,
            now=time.monotonic(),
            silence_s=silence_s,
        )
        if verdict is Verdict.ASK:
            engine.ask()
        elif verdict is Verdict.HANGS:
            _log.error("engine_hangs", instance=engine.instance_id, silent_s=silence_s)
            engine.kill()

    def close(self) -> None:
        """Act no more; whoever calls this ends processes and tasks."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, event: Event) -> None:
        if self._closed:
            return
        for effect in self._core.handle(event, time.monotonic()):
            self._execute(effect)

    def _execute(self, effect: Effect) -> None:
        match effect:
            case StartEngine():
                task = self._background.start(
                    f"engine {effect.wanted.instance_id}", self._run(effect)
                )
                self._runs[effect.generation] = task
            case StopEngine():
                self._stop(effect)
            case LoadEngine():
                self._background.start(f"load {effect.instance_id}", self._load(effect))
            case ReportInstance():
                if status := self._status(effect.instance_id):
                    self._outbox.set_status(status)
            case SetTimer():
                self._arm(effect.at)
            case _:
                assert_never(effect)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(at - time.monotonic(), 0.0)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_s, self._handle, TimerFired())

    def _find_engine(self, instance_id: str) -> EngineProcess | None:
        return self._engines.get(instance_id)

    def _status(self, instance_id: str) -> InstanceStatus | None:
        view, engine = self._core.view(instance_id), self._engines.get(instance_id)
        if view is None:
            return None
        return instance_status(
            view,
            host_id=self._host_id,
            pid=engine.pid if engine else 0,
            num_running=self._book.num_running_on(instance_id),
        )

    def _stop(self, effect: StopEngine) -> None:
        _log.info("engine_stop", instance=effect.instance_id, reason=effect.reason)
        self._bury(effect.instance_id, effect.generation, f"stopped: {effect.reason}")
        if task := self._runs.get(effect.generation):
            task.cancel()

    async def _run(self, start: StartEngine) -> None:
        """One process, from start to end; waits for its events, freed by its end."""
        wanted, generation = start.wanted, start.generation
        _log.info("engine_start", instance=wanted.instance_id, reason=start.reason)
        problem = Problem(ErrorReason.CHILD_DIED, f"{wanted.instance_id} was stopped")
        try:
            problem = await self._serve(start)
        except DomainError as error:
            problem = problem_of_error(error)
        finally:
            self._runs.pop(generation, None)
            self._bury(wanted.instance_id, generation, problem.message)
            self._handle(
                EngineEnded(instance_id=wanted.instance_id, generation=generation, problem=problem)
            )

    async def _serve(self, start: StartEngine) -> Problem:
        wanted = start.wanted
        folder = await self._store.model_folder(wanted)
        child = await self._launcher.start(wanted, folder)
        engine = EngineProcess(child, wanted=wanted, generation=start.generation)
        self._engines[wanted.instance_id] = engine
        exit_code = await engine.run(lambda event: self._on_event(engine, event))
        if engine.refusal is not None:
            return problem_of(engine.refusal)
        message = f"engine {wanted.instance_id} (pid {engine.pid}) ended with code {exit_code}"
        return Problem(ErrorReason.CHILD_DIED, message)

    def _on_event(self, engine: EngineProcess, event: EngineEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "results":
            self.router.finish(event.results.results)
        elif kind == "loaded":
            self._on_loaded(engine, event.loaded)
        elif kind == "pong":
            pass  # whatever it says is a sign of life
        elif event.ready.HasField("failure"):
            engine.refusal = event.ready.failure
        else:
            engine.ready = True
            self._handle(
                EngineReadied(instance_id=engine.instance_id, generation=engine.generation)
            )

    async def _load(self, effect: LoadEngine) -> None:
        try:
            load, lease = await self._store.fetch(effect)
        except DomainError as error:
            self._load_ended(effect, problem_of_error(error))
            return
        engine = self._engines.get(effect.instance_id)
        if engine is None or engine.generation != effect.generation:
            if lease is not None:
                await _close(lease)  # the engine ended meanwhile, which the core knows
            return
        if lease is not None:
            self._leases[(effect.generation, load.load_id)] = lease
        engine.load(load)

    def _on_loaded(self, engine: EngineProcess, loaded: EngineLoaded) -> None:
        self._release_leases(engine.generation, loaded.load_id)
        problem = problem_of(loaded.failure) if loaded.HasField("failure") else None
        self._handle(
            LoadEnded(
                instance_id=engine.instance_id,
                generation=engine.generation,
                load_id=int(loaded.load_id),
                problem=problem,
            )
        )

    def _load_ended(self, effect: LoadEngine, problem: Problem) -> None:
        _log.warning("weights_not_fetched", instance=effect.instance_id, error=problem.message)
        self._handle(
            LoadEnded(
                instance_id=effect.instance_id,
                generation=effect.generation,
                load_id=effect.load_id,
                problem=problem,
            )
        )

    def _bury(self, instance_id: str, generation: int, message: str) -> None:
        """Forget a process: its attempts end, its leases go back."""
        engine = self._engines.get(instance_id)
        if engine is None or engine.generation != generation:
            return
        del self._engines[instance_id]
        self.router.fail_all_on(instance_id, ErrorReason.CHILD_DIED, message)
        self._release_leases(generation)

    def _release_leases(self, generation: int, load_id: str | None = None) -> None:
        for key in [k for k in self._leases if k[0] == generation and load_id in (None, k[1])]:
            lease = self._leases.pop(key)
            if not self._closed:
                self._background.start("give lease back", _close(lease))


async def _close(lease: SegmentReader) -> None:
    try:
        await lease.close()
    except DomainError as error:
        _log.warning("lease_not_given_back", key=lease.object.key, error=error.message)
