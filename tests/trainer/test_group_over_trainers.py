"""A policy whose ranks lie on two trainers: the same numbers, and nothing left behind by a loss."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from trainer.harness import make_rows
from trainer.service_harness import Cluster, Run, Service, fails, start_cluster

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.trainer.v1 import trainer_pb2 as pb
from flexmarl.client.trainer import TrainerClient
from flexmarl.core.errors import ErrorReason
from flexmarl.trainer.talk import FRAME_FORMAT

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

SILENCE_S = 10
SECTIONS: dict[str, Any] = {"optimizer": {"lr": 0.01}, "trainer": {"world_size": 2}}


@dataclass
class Two:
    """Two trainers and a store; the first one has a second slot, to compare with."""

    first: Cluster
    second: Cluster

    async def make_run(self, model: Path) -> Run:
        run = await self.first.make_run({"p": SECTIONS}, {"p": model})
        await self.second.trainer.open_run(run.run_id, term=run.term, shards=run.shards)
        self.second.open_runs.append(run.run_id)
        await run.first_commit("p")
        return run

    async def bind(self, run: Run) -> graph_pb2.StateRecord:
        """Rank 0 on the first trainer, rank 1 on the second."""
        beyond = [pb.TrainerSlots(address=self.second.trainer_service.address, slots=["slot0"])]
        return (await run.bind("p", ["slot0"], beyond=beyond)).state

    async def all_free(self) -> None:
        """Waits until nobody holds a slot of either."""
        for cluster in (self.first, self.second):
            await until(cluster, lambda status: not any(slot.policy for slot in status.slots))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    settings = {"collective_timeout_s": 20, "peer_silence_s": SILENCE_S, "verify_swaps": "true"}
    service = Service(
        "flexmarl.trainer",
        folder / "trainer2",
        data_dir=folder / "trainer2",
        slots='["slot0"]',
        **settings,
    )
    async with start_cluster(folder, **settings) as first:
        await service.start()
        try:
            async with TrainerClient.connect(service.address) as trainer:
                second = replace(first, trainer_service=service, trainer=trainer, open_runs=[])
                yield Two(first, second)
        finally:
            await service.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def two(started: Two) -> AsyncIterator[Two]:
    yield started
    for cluster in (started.first, started.second):
        await cluster.close_runs()


async def until(cluster: Cluster, condition: Callable[[pb.TrainerStatus], bool]) -> None:
    async with asyncio.timeout(60):
        async for status in cluster.trainer.watch_status(interval_s=0.05):
            if condition(status):
                return


async def slot_pid(cluster: Cluster) -> int:
    return (await cluster.trainer.get_status()).slots[0].pid


async def two_updates(run: Run, bind: Callable[[], Awaitable[Any]]) -> list[graph_pb2.StateRecord]:
    """Two batches of two micro-batches, with a suspension between these; the states made."""
    states = []
    for batch in range(2):
        records = [
            await run.micro_batch("p", make_rows(6, seed=2 * batch + i), batch=batch)
            for i in range(2)
        ]
        for number, record in enumerate(records):
            await bind()
            assert (await run.compute(record)).added
            if number == 0:
                await run.suspend("p")
        ids = [record.micro_batch_id for record in records]
        states.append((await run.apply("p", batch, ids)).state)
        await run.suspend("p")
        await run.commit(states[-1])
    return states


async def test_ranks_on_two_trainers_make_the_same_numbers(two: Two, tiny_model: Path) -> None:
    near, far = await two.make_run(tiny_model), await two.make_run(tiny_model)
    expected = await two_updates(near, lambda: near.bind("p", ["slot0", "slot1"]))
    states = await two_updates(far, lambda: two.bind(far))
    for state, like in zip(states, expected, strict=True):
        assert state.weights_hash == like.weights_hash
        for kind in ("master", "moments"):
            made = await far.tensors(getattr(state, kind))
            wanted = await near.tensors(getattr(like, kind))
            assert made.keys() == wanted.keys()
            assert all(np.array_equal(made[name], wanted[name]) for name in wanted)
    await two.all_free()
    # What two ranks on two trainers have written, one rank on the second one reads.
    alone = replace(far, cluster=two.second)
    record = await far.micro_batch("p", make_rows(6, seed=9), batch=2)
    assert (await alone.bind("p", ["slot0"])).state.weights_hash == states[-1].weights_hash
    assert (await alone.compute(record)).added
    await alone.suspend("p")


@pytest.mark.parametrize("whose", ["leading", "lending"])
async def test_a_rank_of_one_trainer_dies_and_nothing_counts_twice(
    two: Two, tiny_model: Path, whose: str
) -> None:
    victim = two.first if whose == "leading" else two.second
    quiet = await two.make_run(tiny_model)
    await quiet.bind("p", ["slot0", "slot1"])
    calm = [await quiet.micro_batch("p", make_rows(6, seed=seed), batch=0) for seed in range(3)]
    for record in calm:
        await quiet.compute(record)
    expected = (await quiet.apply("p", 0, [record.micro_batch_id for record in calm])).state
    await quiet.suspend("p")

    run = await two.make_run(tiny_model)
    records = [await run.micro_batch("p", make_rows(6, seed=seed), batch=0) for seed in range(3)]
    await two.bind(run)
    await run.compute(records[0])
    await run.save("p")
    await run.compute(records[1])
    pid = await slot_pid(victim)
    os.kill(pid, signal.SIGSTOP)  # the other rank now waits for it in a collective
    work = asyncio.create_task(run.compute(records[2]))
    await until(two.second, lambda status: status.slots[0].activity == "gradients")
    os.kill(pid, signal.SIGKILL)
    with fails(ErrorReason.CHILD_DIED, match=f"slot0 \\(pid {pid}\\) died"):
        await work
    await two.all_free()

    late = run.terms["p"]
    assert list((await two.bind(run)).ledger) == [records[0].micro_batch_id]
    with fails(ErrorReason.TERM_STALE):
        await run.compute(records[1], term=late)
    results = [await run.compute(record) for record in records]
    assert [result.counts.num_rows for result in results] == [0, 6, 6]
    applied = (await run.apply("p", 0, [record.micro_batch_id for record in records])).state
    await run.suspend("p")
    assert applied.counts.num_rows == expected.counts.num_rows == 18
    assert applied.weights_hash == expected.weights_hash
    await two.all_free()


async def test_slots_are_lent_once_and_to_nobody_of_another_build(
    two: Two, tiny_model: Path
) -> None:
    run = await two.make_run(tiny_model)
    await two.bind(run)
    borrow = pb.Borrow(
        run_id=run.run_id,
        policy="p",
        term=run.terms["p"],
        slots=["slot0"],
        first_rank=1,
        world_size=2,
        frame_format=FRAME_FORMAT,
        rendezvous_host="127.0.0.1",
    )

    async def answer(first: pb.LendSlotsRequest) -> Any:
        async def said() -> AsyncIterator[pb.LendSlotsRequest]:
            yield first

        async with asyncio.timeout(30):
            return await two.second.trainer.lend_slots(said()).read()

    def asked(**changes: Any) -> pb.LendSlotsRequest:
        message = pb.Borrow()
        message.CopyFrom(borrow)
        message.MergeFrom(pb.Borrow(**changes))
        return pb.LendSlotsRequest(borrow=message)

    with fails(ErrorReason.STATE_TRANSITION_REFUSED, match="bound under term"):
        await answer(asked())
    with fails(ErrorReason.INVALID_ARGUMENT, match="different builds"):
        await answer(asked(frame_format="another"))
    with fails(ErrorReason.INVALID_ARGUMENT, match="no part of a group"):
        await answer(asked(first_rank=2))
    with fails(ErrorReason.INVALID_ARGUMENT, match=r"10\.0\.0\.1:0 cannot meet at 127\.0\.0\.1"):
        await answer(asked(rendezvous_host="10.0.0.1"))
    with fails(ErrorReason.INVALID_ARGUMENT, match="which slots"):
        await answer(pb.LendSlotsRequest(beat=pb.Beat()))
    with fails(ErrorReason.STATE_TRANSITION_REFUSED, match="another trainer leads it"):
        await replace(run, cluster=two.second).save("p")
    # Its run's end there ends the group here.
    await two.second.close_runs()
    await two.all_free()
    with fails(ErrorReason.NOT_READY, ErrorReason.RUN_NOT_FOUND, match="not open"):
        await two.bind(run)


async def test_a_trainer_that_is_frozen_or_gone_holds_nobody(two: Two, tiny_model: Path) -> None:
    run = await two.make_run(tiny_model)
    record = await run.micro_batch("p", make_rows(6), batch=0)
    await two.bind(run)
    second = two.second.trainer_service.process
    assert second is not None
    second.send_signal(signal.SIGSTOP)
    try:
        with fails(ErrorReason.CHILD_DIED, match=f"has said nothing for {SILENCE_S} s"):
            await run.compute(record)
        await until(two.first, lambda status: not any(slot.policy for slot in status.slots))
    finally:
        second.send_signal(signal.SIGCONT)
    await two.all_free()
    await two.bind(run)
    assert (await run.compute(record)).added
    # The leading one dies, so this is the last test: what it has borrowed is free.
    await two.first.trainer_service.stop(signal.SIGKILL)
    two.first.open_runs.clear()
    await until(two.second, lambda status: not status.slots[0].policy)
