"""A rank, or a whole trainer, that stands still and goes on late counts nothing twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from trainer.harness import make_rows
from trainer.service_harness import Cluster, Run, fails, start_cluster
from trainer.test_two_trainers import second_trainer

from flexmarl.core.errors import ErrorReason

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

_COMMAND_S = 8.0
"""Time of a rank for one command: far more than any of these takes."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def impatient(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("stopped")
    async with start_cluster(folder, slots=1, command_timeout_s=_COMMAND_S) as cluster:
        yield cluster


async def bind(run: Run, ids: list[str]) -> object:
    await run.suspend("p")
    await stop(run)
    return await run.bind("p", ["slot0"])


async def gradient(run: Run, ids: list[str]) -> object:
    record = await run.micro_batch("p", make_rows(2, seed=9), batch=0)
    await stop(run)
    return await run.compute(record)


async def save(run: Run, ids: list[str]) -> object:
    await stop(run)
    return await run.save("p")


async def apply(run: Run, ids: list[str]) -> object:
    await stop(run)
    return await run.apply("p", 0, ids)


async def suspend(run: Run, ids: list[str]) -> object:
    await run.save("p")
    await stop(run)
    return await run.suspend("p")


async def stop(run: Run) -> int:
    """Stops the slot's worker."""
    (slot,) = (await run.cluster.trainer.get_status()).slots
    os.kill(slot.pid, signal.SIGSTOP)
    return slot.pid


@pytest.mark.parametrize("stage", [bind, gradient, save, apply, suspend])
async def test_a_rank_that_stands_still_is_ended_and_frees_its_slot(
    impatient: Cluster, tiny_model: Path, stage: Callable[[Run, list[str]], Awaitable[object]]
) -> None:
    run = await impatient.make_run({"p": {"optimizer": {"lr": 0.01}}}, {"p": tiny_model})
    try:
        await run.first_commit("p")
        record = await run.micro_batch("p", make_rows(4, seed=1), batch=0)
        ids = [record.micro_batch_id]
        await run.bind("p", ["slot0"])
        await run.compute(record)
        with fails(ErrorReason.DEADLINE_EXCEEDED, match="slot0"):
            await stage(run, ids)
        (slot,) = (await impatient.trainer.get_status()).slots
        assert (slot.policy, slot.activity) == ("", "")

        await run.bind("p", ["slot0"])
        assert (await run.compute(record)).added
        state = (await run.apply("p", 0, ids)).state
        assert list(state.ledger) == ids
        assert (state.counts.num_rows, state.num_updates) == (4, 1)
        assert (await run.suspend("p")).metrics["used_bytes"] == 0
        assert (await impatient.store.get_stats()).numbers["leases"] == 0
    finally:
        await impatient.close_runs()


@pytest.mark.parametrize("stage", [save, apply])
async def test_a_trainer_that_stands_still_writes_nothing_once_another_has_the_policy(
    impatient: Cluster, tiny_model: Path, stage: Callable[[Run, list[str]], Awaitable[object]]
) -> None:
    async with second_trainer(impatient) as other:
        run = await impatient.make_run({"p": {"optimizer": {"lr": 0.01}}}, {"p": tiny_model})
        await run.first_commit("p")
        there = replace(run, cluster=other)
        await other.trainer.open_run(run.run_id, term=run.term, shards=run.shards)
        records = [await run.micro_batch("p", make_rows(4, seed=n), batch=0) for n in (1, 2)]
        ids = [record.micro_batch_id for record in records]
        await run.bind("p", ["slot0"])
        await run.compute(records[0])
        (slot,) = (await impatient.trainer.get_status()).slots
        # Its rank stands still at once, the service when it has begun to wait for that.
        work = asyncio.create_task(stage(run, ids[:1]))
        async with asyncio.timeout(60):
            async for status in impatient.trainer.watch_status(interval_s=0.02):
                if status.slots[0].activity:
                    break
        service = impatient.trainer_service.process
        assert service is not None
        service.send_signal(signal.SIGSTOP)
        try:
            await there.bind("p", ["slot0"])
            for record in records:
                assert (await there.compute(record)).added
            await there.save("p")
        finally:
            os.kill(slot.pid, signal.SIGCONT)
            service.send_signal(signal.SIGCONT)
        with fails(ErrorReason.TERM_STALE, ErrorReason.DEADLINE_EXCEEDED):
            await work
        (slot,) = (await impatient.trainer.get_status()).slots
        assert (slot.policy, slot.activity) == ("", "")
        state = await impatient.store.get_state(run.run_id, "p")
        assert (state.term, list(state.ledger)) == (run.terms["p"], ids)

        state = (await there.apply("p", 0, ids)).state
        assert (list(state.ledger), state.counts.num_rows, state.num_updates) == (ids, 8, 1)
        await there.suspend("p")
        await other.trainer.close_run(run.run_id, term=1 << 40)
        await impatient.close_runs()
