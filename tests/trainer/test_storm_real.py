"""Calls of all kinds at once, over and over, with cancels, kills, and a run closed on the way.

Nobody who calls so gets far, but whatever comes of it is said by a reason that helps, and at the
end every row has counted once, in one update.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import numpy as np
import psutil
import pytest
from trainer.harness import make_rows
from trainer.service_harness import Cluster, Run, fails
from trainer.test_faults import begin
from trainer.test_service_kills import slot_pid, until_ready

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.core.errors import DomainError, ErrorReason

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.real,
]

POLICIES, SLOTS = ("p", "q"), ("slot0", "slot1")
CALLERS, CALLS = 5, 60
EXPECTED = {
    ErrorReason.STATE_TRANSITION_REFUSED,
    ErrorReason.TERM_STALE,
    ErrorReason.CHILD_DIED,
    ErrorReason.CANCELLED,
    ErrorReason.NOT_FOUND,
    ErrorReason.RUN_NOT_FOUND,
}


async def started(
    cluster: Cluster, model: Path
) -> tuple[Run, dict[str, list[graph_pb2.MicroBatch]]]:
    run = await cluster.make_run(
        {name: {"optimizer": {"lr": 0.01}} for name in POLICIES}, dict.fromkeys(POLICIES, model)
    )
    await run.first_commit(*POLICIES)
    records = {
        name: [
            await run.micro_batch(name, make_rows(4 + seed, seed=seed + 10 * number), batch=0)
            for seed in range(4)
        ]
        for number, name in enumerate(POLICIES)
    }
    return run, records


async def update(run: Run, records: list[graph_pb2.MicroBatch]) -> graph_pb2.StateRecord:
    policy = records[0].policy
    await run.bind(policy, ["slot0"])
    state = await run.cluster.store.get_state(run.run_id, policy)
    if state is None or not state.applied:
        for record in records:
            await run.compute(record)
    ids = [record.micro_batch_id for record in records]
    made = (await run.apply(policy, 0, ids)).state
    await run.suspend(policy)
    return made


class Storm:
    def __init__(
        self, run: Run, records: dict[str, list[graph_pb2.MicroBatch]], rng: Random
    ) -> None:
        self.run, self.records, self.rng = run, records, rng
        self.trainer = run.cluster.trainer
        self.begun: list[str] = []
        self.reasons = set[str]()

    async def call(self) -> None:
        policy = self.rng.choice(POLICIES)
        kinds: list[Callable[[str], Awaitable[object]]] = [
            self.bind, self.bind, self.bind, self.compute, self.compute, self.compute,
            self.run.save, self.run.suspend, self.apply, self.prefetch, self.cancel,
        ]  # fmt: skip
        draw = self.rng.random()
        kind = self.kill if draw < 0.01 else self.reopen if draw < 0.02 else self.rng.choice(kinds)
        try:
            await kind(policy)
        except DomainError as error:
            self.reasons.add(error.reason)
        await asyncio.sleep(self.rng.random() * 0.03)

    def slots(self) -> list[str]:
        return self.rng.sample(SLOTS, self.rng.choice([1, 1, 2]))

    async def bind(self, policy: str) -> None:
        await self.run.bind(policy, self.slots())

    async def compute(self, policy: str) -> None:
        self.begun.append(f"{self.rng.getrandbits(64):x}")
        await begin(self.run, self.rng.choice(self.records[policy]), self.begun[-1])

    async def apply(self, policy: str) -> None:
        await self.run.apply(policy, 0, [item.micro_batch_id for item in self.records[policy]])

    async def prefetch(self, policy: str) -> None:
        await self.trainer.prefetch_policy(self.run.run_id, policy, slots=self.slots())

    async def cancel(self, _: str) -> None:
        for request_id in self.begun[-1:]:
            await self.trainer.cancel_operation(request_id)

    async def kill(self, _: str) -> None:
        pid = await slot_pid(self.run.cluster, self.rng.choice(SLOTS))
        if pid:
            os.kill(pid, signal.SIGKILL)

    async def reopen(self, _: str) -> None:
        await self.trainer.close_run(self.run.run_id, term=self.run.term)
        await self.trainer.open_run(self.run.run_id, term=self.run.term, shards=self.run.shards)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_called_at_once_every_row_counts_once(
    cluster: Cluster, tiny_model: Path, seed: int
) -> None:
    plain, records = await started(cluster, tiny_model)
    expected = {name: await update(plain, records[name]) for name in POLICIES}
    run, records = await started(cluster, tiny_model)
    run.terms = {name: await acquire(run, name) for name in POLICIES}
    storm = Storm(run, records, Random(seed))

    async def caller() -> None:
        for _ in range(CALLS):
            await storm.call()

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    assert storm.reasons <= EXPECTED
    await cluster.trainer.close_run(run.run_id, term=run.term)
    await until_ready(cluster)
    await cluster.trainer.open_run(run.run_id, term=run.term, shards=run.shards)
    for name in POLICIES:
        state = await update(run, records[name])
        assert sorted(state.ledger) == sorted(record.micro_batch_id for record in records[name])
        assert (state.counts, state.num_updates) == (expected[name].counts, 1)
        master = await run.tensors(state.master)
        for key, value in (await plain.tensors(expected[name].master)).items():
            assert np.allclose(master[key], value, rtol=1e-4, atol=1e-6), key


async def acquire(run: Run, policy: str) -> int:
    return await run.cluster.store.acquire_term(run.run_id, f"policy/{policy}", holder="test")


async def test_work_that_comes_before_its_binding_has_a_state_is_refused(
    cluster: Cluster, tiny_model: Path
) -> None:
    run, records = await started(cluster, tiny_model)
    pid = await slot_pid(cluster, "slot0")
    zygote = psutil.Process(pid).ppid()
    os.kill(zygote, signal.SIGSTOP)  # no other worker comes, which the binding waits for
    try:
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            async for status in cluster.trainer.watch_status(interval_s=0.05):
                if not status.ready:
                    break
        binding = asyncio.create_task(run.bind("p", ["slot0"]))
        async with asyncio.timeout(30):
            async for status in cluster.trainer.watch_status(interval_s=0.05):
                if status.slots[0].policy:
                    break
        with fails(ErrorReason.STATE_TRANSITION_REFUSED, match="is being bound under term"):
            await run.compute(records["p"][0])
        with fails(ErrorReason.STATE_TRANSITION_REFUSED, match="is being bound under term"):
            await run.suspend("p")
    finally:
        os.kill(zygote, signal.SIGCONT)
    await binding
    assert (await run.compute(records["p"][0])).added
    await run.suspend("p")
