"""The account of each batch: its numbers, its counts, and the report of its version."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.api.rollout.v1 import rollout_pb2
from flexmarl.client.errors import FlexMarlError
from flexmarl.core.batch_metrics import StepClock, batch_metrics, num_groups
from flexmarl.core.run import RunCore
from flexmarl.core.run_effects import ActivateVersion, CloseGroup, Commit
from flexmarl.core.run_events import EffectDone, Event
from flexmarl.core.states import GroupStatus
from flexmarl.core.training_alarms import training_alarms
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.last_evaluation import evaluation_report
from flexmarl.orchestrator.trainer_effects import TrainerEffects
from flexmarl.runtime.logging import get_logger

_log = get_logger(__name__)

MAX_REPORTS: Final = 4096
"""Newest reports kept in memory; older ones are read from the store."""


class Accounts:
    """Watches a run's events and makes the records of its batches.

    Args:
        context: The run.
        core: Its core.
        trainers: Asked for their busy time at the end of each batch.
    """

    def __init__(
        self, context: RunContext, core: RunCore, trainers: Mapping[str, TrainerEffects]
    ) -> None:
        self._context = context
        self._core = core
        self._trainers = trainers
        self._busy_s: dict[str, float] = {}
        self._numbers: dict[str, float] = {}
        self._shares: list[float] = []
        self._begun: float | None = None

    def observe(self, events: Iterable[Event]) -> None:
        """Note the moments of the step."""
        clock, now = self._context.clock, time.monotonic()
        for event in events:
            if not isinstance(event, EffectDone):
                continue
            match event.effect:
                case CloseGroup():
                    clock.closed = now
                case ActivateVersion():
                    clock.activated = now
                case Commit(version=version):
                    # The commit opens the next step's account; the first one opens the run's.
                    begun = now if version == 0 or self._begun is None else self._begun
                    self._context.clock = clock = StepClock(begun=begun, committed=now)
                    self._begun = None
                    if version > 0:
                        self._report(version)

    def see_rollout(self, status: rollout_pb2.RolloutStatus) -> None:
        """Note how busy the instances are."""
        shares = [instance.busy_fraction for instance in status.instances]
        if shares:
            self._shares.append(sum(shares) / len(shares))
            del self._shares[:-256]

    async def updates_made(self) -> None:
        """All updates of the batch are made: the step ends here."""
        if self._begun is not None:
            return  # a second count of the same batch
        batch = self._core.batch
        assert batch is not None, "updates belong to a batch"
        now = self._begun = time.monotonic()
        step = self._context.clock.parts(now)
        step_s = step["step_s"]
        numbers = batch_metrics(batch, self._core.training, step_s=step_s)
        alarms = {name: value for name, value in numbers.items() if name.startswith("alarm/")}
        if alarms:
            _log.warning("reward_alarm", run=self._context.run_id, batch=batch.number, **alarms)
        evaluation = self._core.evaluation
        evaluated = {} if evaluation is None else evaluation.metrics()
        self._numbers = {**step, **numbers, **self._training_numbers(), **evaluated}
        if self._shares:
            self._numbers["utilisation/rollout"] = sum(self._shares) / len(self._shares)
            self._shares.clear()
        await self._add_trainer_utilisation(step_s)

    def record(self, effect: Commit, counts: pb.CountVerticesResponse) -> graph_pb2.BatchRecord:
        """The account that the commit of a batch carries."""
        batch = self._core.batch
        assert batch is not None, "a batch is committed before the next one begins"
        return graph_pb2.BatchRecord(
            batch=effect.version - 1,
            batch_attempt=batch.batch.attempt,
            num_groups_closed=num_groups(batch, GroupStatus.CLOSED),
            num_groups_dropped=num_groups(batch, GroupStatus.DROPPED),
            policies=counts.policies,
            metrics=self._numbers,
        )

    def finish(self) -> None:
        """The run has ended: its last version has no batch, but may have been evaluated."""
        evaluation = self._core.evaluation
        if self._core.batch is None and evaluation is not None and evaluation.done:
            self._context.reports.append(evaluation_report(evaluation))

    def _training_numbers(self) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for policy, metrics in sorted(self._context.train_means.take().items()):
            numbers.update({f"train/{policy}/{name}": value for name, value in metrics.items()})
            for alarm in training_alarms(metrics):
                numbers[f"alarm/{policy}/{alarm.name}"] = 1.0
                _log.warning("training_alarm", policy=policy, alarm=alarm.name, why=alarm.text)
        return numbers

    async def _add_trainer_utilisation(self, step_s: float) -> None:
        slots, busy_s, known = 0, 0.0, True
        for address, trainer in self._trainers.items():
            try:
                status = await trainer.status()
            except FlexMarlError:
                self._busy_s.clear()  # a number less; the next batch begins anew
                return
            for slot in status.slots:
                key = f"{address}/{status.incarnation}/{slot.slot}"
                known = known and key in self._busy_s
                slots += 1
                busy_s += slot.busy_s - self._busy_s.get(key, 0.0)
                self._busy_s[key] = slot.busy_s
        if known and slots and step_s > 0:
            self._numbers["utilisation/trainer"] = min(busy_s / (slots * step_s), 1.0)

    def _report(self, version: int) -> None:
        manifest = self._context.manifest
        assert manifest is not None, "it was committed just now"
        report = orchestrator_pb2.VersionReport(
            version=version - 1,
            batch=manifest.batch,
            committed_unix_ns=manifest.committed_unix_ns,
        )
        self._context.totals.committed(manifest.batch)
        self._context.reports.append(report)
        del self._context.reports[:-MAX_REPORTS]
