"""Drives one run: executes what the core wants done, and tells it what happened.

    store events --.                                     .--> store effects   --> MEG Store
    status streams +--> inbox --> core.handle(now) ------+--> rollout effects --> dispatcher
    ends of effects'                                     '--> trainer effects --> trainers

The only reader of the clock. Waits for the inbox, freed by any event; each effect runs in a task of
its own, independent ones side by side, each with its own patience and its name in `waits`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flexmarl.core.errors import DomainError
from flexmarl.core.run import RunCore
from flexmarl.core.run_effects import (
    ActivateVersion,
    AdmitGroups,
    Apply,
    Bind,
    CancelSamples,
    CloseGroup,
    CloseSubgraphs,
    Commit,
    Compute,
    ComputeAdvantages,
    CountVertices,
    CreateMicroBatch,
    Effect,
    EndRun,
    MarkRows,
    OpenRollout,
    OpenTrainer,
    Prefetch,
    PrepareWeights,
    ReadRows,
    SaveGradients,
    SetTimer,
    StartSamples,
    Suspend,
    TrainerWork,
    VoidRows,
    Work,
)
from flexmarl.core.run_events import (
    EffectDone,
    EffectFailed,
    FatalReported,
    Result,
    RolloutLost,
    StopRequested,
    StoredRun,
    TimerFired,
    TrainerLost,
)
from flexmarl.core.training_rows import RunFailure
from flexmarl.orchestrator.accounts import Accounts
from flexmarl.orchestrator.calls import TakenOverError
from flexmarl.orchestrator.checkpoints import Checkpoints
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.convert import failure_of, failure_of_error
from flexmarl.orchestrator.inbox import Inbox
from flexmarl.orchestrator.rollout_effects import RolloutEffects, RolloutLostError
from flexmarl.orchestrator.rules import rules_of
from flexmarl.orchestrator.store_effects import StoreEffects
from flexmarl.orchestrator.trainer_effects import TrainerEffects
from flexmarl.orchestrator.watchers import watch_status, watch_store
from flexmarl.runtime.aio import Background
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.spans import SpanRecorder

_log = get_logger(__name__)


class Driver:
    """One run under one term; `drive` returns when it ended.

    Args:
        context: The run.
        stored: What the store held of it.
        rollout: Effects on the dispatcher.
        trainers: Effects on the trainers, by address.
        spans: Where effects are recorded for the timeline.
        status_interval_s: Time between two states of a service.
        confirm_term_s: Time between two checks that nobody has taken the run over.
        cache_dir: Where base models are unpacked for checkpoints.
    """

    def __init__(
        self,
        context: RunContext,
        stored: StoredRun,
        *,
        rollout: RolloutEffects,
        trainers: Mapping[str, TrainerEffects],
        spans: SpanRecorder,
        status_interval_s: float,
        confirm_term_s: float,
        cache_dir: Path,
    ) -> None:
        rules = rules_of(
            context.config, trainers=sorted(trainers), num_held_out=len(context.queries.held_out)
        )
        self.core = RunCore(rules, context.order, stored)
        self._context = context
        self._rollout = rollout
        self._trainers = trainers
        self._spans = spans
        self._interval_s = status_interval_s
        self._confirm_term_s = confirm_term_s
        self._inbox = Inbox()
        self._accounts = Accounts(context, self.core, trainers)
        self._store = StoreEffects(context, self._accounts.record)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._background = Background(self._task_failed)
        self._checkpoints = Checkpoints(context, self._background, cache_dir=cache_dir)
        self._taken_over: TakenOverError | None = None
        self._execute: Mapping[type, Callable[[Any], Awaitable[Result]]] = {
            OpenRollout: self._open_rollout,
            OpenTrainer: self._open_trainer,
            StartSamples: rollout.start_samples,
            CancelSamples: rollout.cancel_samples,
            ComputeAdvantages: rollout.compute_advantages,
            PrepareWeights: rollout.prepare_weights,
            ActivateVersion: rollout.activate,
            AdmitGroups: self._store.admit_groups,
            ReadRows: self._store.read_rows,
            CloseGroup: self._store.close_group,
            CloseSubgraphs: self._store.close_subgraphs,
            CreateMicroBatch: self._store.create_micro_batch,
            MarkRows: self._store.mark_rows,
            VoidRows: self._store.void_rows,
            CountVertices: self._count_vertices,
            Commit: self._store.commit,
            Bind: self._on_trainer,
            Compute: self._on_trainer,
            SaveGradients: self._on_trainer,
            Apply: self._on_trainer,
            Suspend: self._on_trainer,
            Prefetch: self._prefetch,
        }

    def stop(self, *, finish_batch: bool) -> None:
        """Ask the run to stop."""
        self._inbox.push(StopRequested(finish_batch))

    async def drive(self) -> EndRun:
        """Drive the run to its end.

        Returns:
            How it ended.

        Raises:
            TakenOverError: Another orchestrator drives it now.
        """
        self._background.start("store events", watch_store(self._context, self._inbox))
        self._background.start("term", self._confirm_term())
        if (manifest := self._context.manifest) is not None:
            self._checkpoints.resume(manifest.version)
        try:
            self._begin(self.core.handle((), now=time.monotonic()))
            while self.core.ended is None:
                events = await self._inbox.take()
                if self._taken_over is not None:
                    raise self._taken_over
                effects = self.core.handle(events, now=time.monotonic())
                self._accounts.observe(events)
                self._checkpoints.observe(events)
                self._begin(effects)
            self._accounts.finish()
            await self._checkpoints.finish()
            return self.core.ended
        finally:
            for timer in self._timers.values():
                timer.cancel()
            await self._background.close()

    def _begin(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SetTimer):
                self._set_timer(effect)
            elif isinstance(effect, EndRun):
                _log.info("run_ends", status=effect.status.value, reason=effect.reason)
            else:
                self._background.start(effect.waits, self._perform(effect))

    def _set_timer(self, effect: SetTimer) -> None:
        old = self._timers.pop(effect.name, None)
        if old is not None:
            old.cancel()
        delay_s = max(effect.at - time.monotonic(), 0.0)
        fire = partial(self._inbox.push, TimerFired(effect.name))
        self._timers[effect.name] = asyncio.get_running_loop().call_later(delay_s, fire)

    async def _perform(self, effect: Work) -> None:
        begun_s = time.time()
        try:
            result = await self._execute[type(effect)](effect)
        except TakenOverError as error:
            self._give_up(error)
        except RolloutLostError as error:
            self._lose_rollout(str(error))
            failure = RunFailure(reason="NOT_FOUND", message=str(error))
            self._inbox.push(EffectFailed(effect, failure))
        except DomainError as error:
            _log.warning("effect_failed", waits=effect.waits, error=str(error))
            self._context.totals.effect_failures[type(effect).__name__, error.reason.value] += 1
            self._inbox.push(EffectFailed(effect, failure_of_error(error)))
        except Exception as error:  # noqa: BLE001 - an effect's end is told, whatever it is
            _log.exception("effect_raised", waits=effect.waits)
            self._inbox.push(EffectFailed(effect, failure_of_error(error)))
        else:
            self._inbox.push(EffectDone(effect, result))
        self._record(effect, begun_s)

    async def _confirm_term(self) -> None:
        """Finds out in bounded time that the run was taken over, also while samples only run.

        Waits `confirm_term_s` between two checks; freed by the driver's end.
        """
        while True:
            await asyncio.sleep(self._confirm_term_s)
            try:
                await self._context.confirm_term()
            except TakenOverError as error:
                self._give_up(error)
                return

    def _give_up(self, error: TakenOverError) -> None:
        self._taken_over = error
        self._inbox.push(TimerFired("taken over"))

    def _record(self, effect: Work, begun_s: float) -> None:
        track = "orchestrator"
        if isinstance(effect, Bind | Compute | SaveGradients | Apply | Suspend):
            track = f"policy/{effect.policy}"
        self._spans.add(
            track,
            type(effect).__name__,
            begun_s,
            time.time(),
            run=self._context.run_id,
            what=effect.waits,
            reason=effect.reason,
        )

    async def close_services(self) -> None:
        """Have the other services let go of the run; who does not answer is left."""
        closing = [self._rollout.close(), *(t.close() for t in self._trainers.values())]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                _log.info("service_not_closed", why=str(outcome))

    # Services and their restarts

    async def _open_rollout(self, effect: OpenRollout) -> None:
        await self._rollout.open(effect)
        self._background.start(
            "rollout status",
            watch_status(
                self._rollout.watch(interval_s=self._interval_s),
                incarnation=self._rollout.incarnation,
                on_status=self._rollout_status,
                on_lost=self._lose_rollout,
                inbox=self._inbox,
                who=f"the dispatcher at {self._rollout.address}",
            ),
        )

    async def _open_trainer(self, effect: OpenTrainer) -> Result:
        trainer = self._trainers[effect.trainer]
        opened = await trainer.open(effect)
        self._background.start(
            f"trainer status {effect.trainer}",
            watch_status(
                trainer.watch(interval_s=self._interval_s),
                incarnation=trainer.incarnation,
                on_status=partial(self._context.trainer_status.__setitem__, effect.trainer),
                on_lost=lambda why: self._inbox.push(TrainerLost(effect.trainer, why)),
                inbox=self._inbox,
                who=f"the trainer at {effect.trainer}",
            ),
        )
        return opened

    def _rollout_status(self, status: Any) -> None:  # noqa: ANN401 - RolloutStatus
        self._context.rollout_status = status
        self._accounts.see_rollout(status)
        if status.HasField("fatal"):
            self._inbox.push(FatalReported(failure_of(status.fatal)))

    def _lose_rollout(self, why: str) -> None:
        # Several calls may notice the same loss; one is told.
        if self._rollout.incarnation:
            self._rollout.incarnation = ""
            _log.warning("rollout_lost", why=why)
            self._inbox.push(RolloutLost(why))

    # Effects that need more than one service

    async def _count_vertices(self, effect: CountVertices) -> Result:
        await self._accounts.updates_made()
        return await self._store.count_vertices(effect)

    async def _on_trainer(self, effect: TrainerWork) -> Result:
        return await self._trainers[effect.trainer].perform(effect)

    async def _prefetch(self, effect: Prefetch) -> None:
        await self._trainers[effect.trainer].prefetch(effect)

    def _task_failed(self, name: str, error: BaseException) -> None:
        failure = failure_of_error(error) if isinstance(error, Exception) else None
        if failure is not None:
            self._inbox.push(FatalReported(failure))
        _log.error("driver_task_failed", task=name)
