"""Policies that change slots through the service, whose state comes from the slots they left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from trainer.harness import make_rows, write_model
from trainer.service_harness import Cluster, Run, start_cluster

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.core.errors import DomainError, ErrorReason

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

PLACES = [["slot0", "slot1"], ["slot2", "slot3"], ["slot1", "slot2"], ["slot0", "slot1"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("handover")
    async with start_cluster(folder, slots=4, state_path="device") as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def four(started: Cluster) -> AsyncIterator[Cluster]:
    yield started
    await started.close_runs()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a kill can come while its state is on its way."""
    return write_model(tmp_path_factory.mktemp("model"), vocab_size=100_000)


async def make_run(cluster: Cluster, model: Path) -> Run:
    policy = {"optimizer": {"lr": 0.01}, "trainer": {"world_size": 2}}
    run = await cluster.make_run({"p": policy, "q": policy}, {"p": model, "q": model})
    await run.first_commit("p", "q")
    return run


async def update(run: Run, places: list[list[str]]) -> tuple[graph_pb2.StateRecord, list[set[str]]]:
    """A micro-batch per place, a suspension after each; returns the update, and paths by place."""
    ids, paths = [], []
    for number, slots in enumerate(places):
        record = await run.micro_batch("p", make_rows(4, seed=number), batch=0)
        paths.append(set((await run.bind("p", slots)).loaded_bytes))
        assert (await run.compute(record)).added
        ids.append(record.micro_batch_id)
        if number < len(places) - 1:
            await run.suspend("p")
    state = (await run.apply("p", 0, ids)).state
    await run.suspend("p")
    return state, paths


async def test_a_policy_that_changes_slots_takes_its_state_along_and_ends_the_same(
    four: Cluster, model: Path
) -> None:
    stays = await make_run(four, model)
    expected, paths = await update(stays, PLACES[:1] * 4)
    assert paths[1:] == [{"kept", "segments"}] * 3
    moves = await make_run(four, model)
    state, paths = await update(moves, PLACES)
    # The gradient sum is nobody's to keep: it is read from its segment each time. Where the last
    # place has its ranks, it had them before.
    assert paths[1:] == [{"device", "segments"}, {"device", "segments"}, {"kept", "segments"}]
    assert state.weights_hash == expected.weights_hash
    for kind in ("master", "moments"):
        made = await moves.tensors(getattr(state, kind))
        wanted = await stays.tensors(getattr(expected, kind))
        assert all((made[name] == wanted[name]).all() for name in wanted)


async def test_two_policies_that_change_places_do_not_wait_for_each_other(
    four: Cluster, model: Path
) -> None:
    run = await make_run(four, model)
    for policy, slots in zip("pq", PLACES[:2], strict=True):
        await run.bind(policy, slots)
    await asyncio.gather(*(run.suspend(policy) for policy in "pq"))
    bound = await asyncio.gather(
        *(run.bind(policy, slots) for policy, slots in zip("qp", PLACES[:2], strict=True))
    )
    # An end that had waited in vain would have read the segments.
    assert [set(result.loaded_bytes) for result in bound] == [{"device"}] * 2
    assert [result.state.weights_hash for result in bound] == [
        run.weights_hash(policy) for policy in "qp"
    ]
    await asyncio.gather(*(run.suspend(policy) for policy in "pq"))


@pytest.mark.parametrize("whose", ["keeper's", "bound"])
@pytest.mark.parametrize("after_s", [0.0, 0.03])
async def test_a_rank_that_dies_in_a_handover_leaves_nothing_half_bound(
    four: Cluster, model: Path, whose: str, after_s: float
) -> None:
    calm = await make_run(four, model)
    expected, _ = await update(calm, PLACES[:1] * 2)
    run = await make_run(four, model)
    records = [await run.micro_batch("p", make_rows(4, seed=seed), batch=0) for seed in range(2)]
    await run.bind("p", PLACES[0])
    await run.compute(records[0])
    await run.suspend("p")
    victim = 0 if whose == "keeper's" else 2
    pid = (await four.trainer.get_status()).slots[victim].pid
    binding = asyncio.create_task(run.bind("p", PLACES[1]))
    await asyncio.sleep(after_s)  # whenever it comes, the outcome is one of two
    os.kill(pid, signal.SIGKILL)
    try:
        bound = (await binding).state
    except DomainError as error:
        assert whose == "bound", error
        assert error.reason in (ErrorReason.CHILD_DIED, ErrorReason.TERM_STALE), error
        held = [slot.slot for slot in (await four.trainer.get_status()).slots if slot.policy]
        assert not held
        bound = (await run.bind("p", PLACES[1])).state
    except BaseException:
        binding.cancel()
        raise
    assert list(bound.ledger) == [records[0].micro_batch_id]
    try:
        result = await run.compute(records[1])
    except DomainError:  # it died right after it was bound
        assert whose == "bound"
        await run.bind("p", PLACES[1])
        result = await run.compute(records[1])
    assert result.added
    state = (await run.apply("p", 0, [record.micro_batch_id for record in records])).state
    await run.suspend("p")
    assert state.weights_hash == expected.weights_hash
