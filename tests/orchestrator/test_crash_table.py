"""An orchestrator killed at each point of the crash table (docs/architecture.md)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from orchestrator.books import check_books
from orchestrator.cluster import AGENTS, Cluster, Processes, cluster, run_config
from orchestrator.standin_rollout import StandInRollout
from orchestrator.standin_trainer import Bound, StandInTrainer

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.rollout.v1 import rollout_pb2
from flexmarl.api.trainer.v1 import trainer_pb2 as pb
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import parse_batch

pytestmark = pytest.mark.real

BATCH = 1
"""The batch in which it dies."""


class Staying(StandInTrainer):
    """Of one batch, computes the first micro-batches and makes the first updates alone.

    Attributes:
        computes: Micro-batches that it may still compute; None: all.
        applies: Updates that it may still make; None: all.
        staying: Policies whose update it does not make.
    """

    def __init__(self, *, computes: int | None = None, applies: int | None = None) -> None:
        super().__init__(num_slots=len(AGENTS))  # so that nobody is suspended, which saves
        self.computes = computes
        self.applies = applies
        self.staying: set[str] = set()

    @property
    def computed_then(self) -> list[str]:
        """Micro-batches of the batch."""
        return [name for name in self.computed if parse_batch(name).batch == BATCH]

    def let_go(self) -> None:
        """Do everything from now on."""
        self.computes = self.applies = None

    async def _compute(self, request: pb.ComputeGradientsRequest, bound: Bound) -> pb.Operation:
        if request.version == BATCH:
            while self.computes == 0:
                await self._wait(bound)
            if self.computes is not None:
                self.computes -= 1
        return await super()._compute(request, bound)

    async def _apply(self, request: pb.ApplyUpdateRequest, bound: Bound) -> pb.Operation:
        if request.batch == BATCH:
            while self.applies == 0:
                self.staying.add(bound.policy)
                await self._wait(bound)
            if self.applies is not None:
                self.applies -= 1
        return await super()._apply(request, bound)

    async def _wait(self, bound: Bound) -> None:
        await asyncio.sleep(0.01)
        if self._bound.get(bound.policy) is not bound:
            raise DomainError(ErrorReason.CHILD_DIED, "its process group ended")


class Silent(StandInRollout):
    """Takes no version that follows the batch until it is let.

    Attributes:
        is_let: Whether it may.
    """

    is_let = False

    async def ActivateVersion(
        self, request: rollout_pb2.ActivateVersionRequest, context: object
    ) -> rollout_pb2.ActivateVersionResponse:
        while request.manifest.version == BATCH + 1 and not self.is_let:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await super().ActivateVersion(request, context)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the test's timeout bounds it
        await asyncio.sleep(0.01)


async def ends_under_another(run: Cluster) -> None:
    """A new orchestrator ends the run, and nothing is missing or counted twice."""
    num_bindings = len(run.trainer.bindings)
    run.orchestrator_process.clean()
    await run.orchestrator_process.start()
    await run.client.resume_run(run.run_id, home_shard=run.home)
    if isinstance(run.trainer, Staying):
        # Not before what the old one had under way is out of the game.
        await until(lambda: len(run.trainer.bindings) > num_bindings)
        run.trainer.let_go()
    assert (await run.follow()).status == common.RUN_STATUS_FINISHED
    await check_books(run)


async def test_gradients_computed_and_not_saved(processes: Processes) -> None:
    trainer = Staying(computes=2)
    async with cluster(processes, trainer=trainer) as run:
        await run.submit(run_config(trainer={"slots": 3}))
        await until(lambda: len(trainer.computed_then) == 2)
        lost = trainer.computed_then
        await ends_under_another(run)
        again = Counter(trainer.computed_then)
        assert [again[name] for name in lost] == [2, 2]


@pytest.mark.parametrize("num_saved", [0, 1])
async def test_updates_computed_and_those_of_some_policies_saved(
    processes: Processes, num_saved: int
) -> None:
    trainer = Staying(applies=num_saved)
    async with cluster(processes, trainer=trainer) as run:
        await run.submit(run_config(trainer={"slots": 3}))
        await until(lambda: len(trainer.staying) == len(AGENTS) - num_saved)
        await until(lambda: sum(batch == BATCH for _, batch in trainer.applied) == num_saved)
        await ends_under_another(run)
        # One that was saved is answered from what was saved.
        assert set(Counter(trainer.applied).values()) == {1}


async def test_the_commit_written_and_nobody_told(processes: Processes) -> None:
    rollout = Silent()
    async with cluster(processes, rollout=rollout) as run:
        await run.submit(run_config())
        await run.until(lambda m: m is not None and m.version == BATCH + 1)
        assert rollout.activated == [0, 1]
        run.orchestrator_process.kill()
        rollout.is_let = True
        await ends_under_another(run)
        assert sorted(set(rollout.activated)) == [0, 1, 2, 3]
        assert set(Counter(run.trainer.applied).values()) == {1}
