"""How slots are shared: each mode, and hints that come to nothing."""

from __future__ import annotations

import asyncio

from orchestrator.books import check_books
from orchestrator.cluster import AGENTS, Processes, cluster, run_config
from orchestrator.standin_rollout import StandInRollout, good_sample
from orchestrator.standin_trainer import Bound, StandInTrainer

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.trainer.v1 import trainer_pb2 as pb
from flexmarl.core.errors import DomainError, ErrorReason


async def test_static_allocation_gives_each_policy_a_slot_of_its_own(processes: Processes) -> None:
    trainer = StandInTrainer(num_slots=3)
    static = run_config(versions=2, trainer={"slots": 3}, pipeline={"allocation": "static"})
    async with cluster(processes, trainer=trainer) as run:
        await run.submit(static)
        assert (await run.follow()).status == common.RUN_STATUS_FINISHED
        await check_books(run, versions=2)
    assert sorted(policy for policy, _ in trainer.bindings) == sorted(AGENTS)
    assert {slots for _, slots in trainer.bindings} == {("slot0",), ("slot1",), ("slot2",)}
    assert trainer.suspended == []


async def test_colocated_nothing_is_bound_while_samples_run(processes: Processes) -> None:
    trainer = StandInTrainer()
    bound: set[tuple[str, ...]] = set()

    def verdict(spec):
        bound.add(trainer.bound)
        return good_sample(spec)

    async with cluster(processes, rollout=StandInRollout(verdict), trainer=trainer) as run:
        await run.submit(run_config(versions=2, pipeline={"colocated": True}))
        assert (await run.follow()).status == common.RUN_STATUS_FINISHED
        await check_books(run, versions=2)
    assert bound == {()}
    assert set(trainer.suspended) == set(AGENTS)


async def test_a_policy_that_needs_more_slots_than_the_trainer_has_ends_the_run(
    processes: Processes,
) -> None:
    async with cluster(processes) as run:
        await run.submit(run_config(world_size=3, trainer={"slots": 3}))
        progress = await run.follow()
        assert progress.status == common.RUN_STATUS_FAILED
        assert progress.failure.reason == ErrorReason.INVALID_ARGUMENT
        assert "trainer.world_size = 3" in progress.failure.message
        assert "has 2)" in progress.failure.message
    assert run.trainer.bindings == []


class NoHints(StandInTrainer):
    """Computes nothing before the first hint, which never ends; all others are refused."""

    async def _prefetch(self) -> pb.Operation:
        if len(self.hints) == 1:
            await asyncio.Event().wait()
        raise DomainError(ErrorReason.SEGMENT_NOT_FOUND, "freed meanwhile")

    async def _compute(self, request: pb.ComputeGradientsRequest, bound: Bound) -> pb.Operation:
        while not self.hints:  # noqa: ASYNC110 - the orchestrator moves it
            await asyncio.sleep(0.01)
        return await super()._compute(request, bound)


async def test_nothing_depends_on_hints(processes: Processes) -> None:
    trainer = NoHints(num_slots=1)
    async with cluster(processes, trainer=trainer) as run:
        await run.submit(run_config(versions=2, trainer={"prefetch_from_s": 0}))
        assert (await run.follow()).status == common.RUN_STATUS_FINISHED
        await check_books(run, versions=2)
    assert trainer.hints
