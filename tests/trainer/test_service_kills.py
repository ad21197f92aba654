"""I12 in this room: kill a rank, the trainer, the store; no row is lost, none counts twice."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from trainer.harness import make_rows
from trainer.service_harness import Cluster, Run, fails

from flexmarl.core.errors import ErrorReason

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(loop_scope="session")
async def run(cluster: Cluster, tiny_model: Path) -> Run:
    run = await cluster.make_run({"p": {"optimizer": {"lr": 0.01}}}, {"p": tiny_model})
    await run.first_commit("p")
    return run


async def expected_hash(cluster: Cluster, tiny_model: Path, seeds: list[int]) -> str:
    """Weights of the same rows trained on without anything going wrong."""
    run = await cluster.make_run({"p": {"optimizer": {"lr": 0.01}}}, {"p": tiny_model})
    await run.first_commit("p")
    await run.bind("p", ["slot0"])
    ids = []
    for seed in seeds:
        record = await run.micro_batch("p", make_rows(4, seed=seed), batch=0)
        await run.compute(record)
        ids.append(record.micro_batch_id)
    state = (await run.apply("p", 0, ids)).state
    await run.suspend("p")
    return state.weights_hash


async def slot_pid(cluster: Cluster, slot: str) -> int:
    status = await cluster.trainer.get_status()
    return next(item.pid for item in status.slots if item.slot == slot)


async def until_ready(cluster: Cluster) -> None:
    async with asyncio.timeout(100):
        async for status in cluster.trainer.watch_status(interval_s=0.05):
            if status.ready:
                return


async def test_a_killed_rank_costs_what_was_not_saved_and_no_more(
    cluster: Cluster, run: Run, tiny_model: Path
) -> None:
    records = [await run.micro_batch("p", make_rows(4, seed=seed), batch=0) for seed in (1, 2, 3)]
    await run.bind("p", ["slot0"])
    await run.compute(records[0])
    await run.save("p")
    await run.compute(records[1])
    pid = await slot_pid(cluster, "slot0")
    os.kill(pid, signal.SIGKILL)
    # By when the death is noticed: while it computes, before it is let in, while it waits for that.
    with fails(
        ErrorReason.CHILD_DIED, ErrorReason.STATE_TRANSITION_REFUSED, ErrorReason.TERM_STALE
    ):
        await run.compute(records[2])
    await until_ready(cluster)
    assert await slot_pid(cluster, "slot0") != pid

    state = (await run.bind("p", ["slot0"])).state
    assert list(state.ledger) == [records[0].micro_batch_id]
    results = [await run.compute(record) for record in records]
    assert [result.counts.num_rows for result in results] == [0, 4, 4]
    applied = (await run.apply("p", 0, [record.micro_batch_id for record in records])).state
    await run.suspend("p")
    assert applied.counts.num_rows == 12
    assert applied.weights_hash == await expected_hash(cluster, tiny_model, [1, 2, 3])


async def test_a_rank_that_dies_at_work_is_named_and_takes_its_partners_work_along(
    cluster: Cluster, tiny_model: Path
) -> None:
    run = await cluster.make_run({"p": {"trainer": {"world_size": 2}}}, {"p": tiny_model})
    await run.first_commit("p")
    record = await run.micro_batch("p", make_rows(4), batch=0)
    await run.bind("p", ["slot0", "slot1"])
    pid = await slot_pid(cluster, "slot1")
    idle_s = (await cluster.trainer.get_status()).slots[0].busy_s
    os.kill(pid, signal.SIGSTOP)
    work = asyncio.create_task(run.compute(record))
    async with asyncio.timeout(60):
        async for status in cluster.trainer.watch_status(interval_s=0.02):
            if status.slots[0].busy_s > idle_s:  # its partner waits for it in a collective
                break
    os.kill(pid, signal.SIGKILL)
    with fails(ErrorReason.CHILD_DIED, match=f"slot1 \\(pid {pid}\\)"):
        await work
    await until_ready(cluster)
    await run.bind("p", ["slot0", "slot1"])
    assert (await run.compute(record)).added
    await run.suspend("p")


@pytest.mark.real  # the runs of tests/integration have their trainer killed at every change
async def test_a_killed_trainer_comes_back_and_the_ledger_decides(
    cluster: Cluster, run: Run, tiny_model: Path
) -> None:
    records = [await run.micro_batch("p", make_rows(4, seed=seed), batch=0) for seed in (4, 5)]
    await run.bind("p", ["slot0"])
    await run.compute(records[0])
    await run.save("p")
    await run.compute(records[1])
    service = cluster.trainer_service
    assert service.process is not None
    before = (await cluster.trainer.get_status()).incarnation
    children = psutil.Process(service.process.pid).children(recursive=True)
    assert len(children) >= 3
    await service.stop(signal.SIGKILL)
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 60)
    assert not alive  # I15
    await service.start()

    opened = await cluster.trainer.open_run(run.run_id, term=run.term, shards=run.shards)
    assert opened.incarnation != before
    state = (await run.bind("p", ["slot1"])).state
    assert list(state.ledger) == [records[0].micro_batch_id]
    for record in records:
        assert (await run.compute(record)).added
    applied = (await run.apply("p", 0, [record.micro_batch_id for record in records])).state
    await run.suspend("p")
    assert applied.weights_hash == await expected_hash(cluster, tiny_model, [4, 5])


async def test_a_killed_store_is_waited_for(cluster: Cluster, run: Run, tiny_model: Path) -> None:
    record = await run.micro_batch("p", make_rows(4, seed=6), batch=0)
    await run.bind("p", ["slot0"])
    await run.compute(record)
    await cluster.store_service.stop(signal.SIGKILL)
    work = asyncio.create_task(run.apply("p", 0, [record.micro_batch_id]))
    await asyncio.sleep(0.2)
    assert not work.done()
    await cluster.store_service.start()
    state = (await work).state
    assert state.version == 1
    await run.suspend("p")
    assert state.weights_hash == await expected_hash(cluster, tiny_model, [6])
