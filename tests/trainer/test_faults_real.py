"""Four ranks: hangs, deaths in mid-step, passes that do not fit, and changes of the ranks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from trainer.harness import make_rows
from trainer.service_harness import Cluster, Run, fails, start_cluster
from trainer.test_user_losses import LOSSES

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.core.errors import ErrorReason
from flexmarl.runtime.spans import Span, read_spans

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.real,
]

FOUR = [f"slot{number}" for number in range(4)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("four")
    async with start_cluster(folder, slots=4, collective_timeout_s=5) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def four(started: Cluster) -> AsyncIterator[Cluster]:
    yield started
    await started.close_runs()


async def make_run(cluster: Cluster, model: Path, **sections: Any) -> Run:
    policy: dict[str, Any] = {"optimizer": {"lr": 0.01}, **sections}
    run = await cluster.make_run({"p": policy}, {"p": model})
    await run.first_commit("p")
    return run


async def pid_of(cluster: Cluster, slot: str) -> int:
    status = await cluster.trainer.get_status()
    return next(item.pid for item in status.slots if item.slot == slot)


async def until_ready(cluster: Cluster) -> None:
    async with asyncio.timeout(100):
        async for status in cluster.trainer.watch_status(interval_s=0.05):
            if status.ready:
                return


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


async def test_two_one_and_four_ranks_make_the_update_of_one(
    four: Cluster, tiny_model: Path
) -> None:
    """The vocabulary of 7 does not divide by 2 or 4."""
    masters = []
    for groups in ([["slot0"]] * 4, [["slot0", "slot1"], ["slot2"], FOUR, ["slot3"]]):
        run = await make_run(four, tiny_model, trainer={"compute_dtype": "float64"})
        ids = []
        for seed, slots in enumerate(groups[:3]):
            record = await run.micro_batch("p", make_rows(8, seed=seed), batch=0)
            ids.append(record.micro_batch_id)
            await run.bind("p", slots)
            assert (await run.compute(record)).counts.num_rows == 8
            assert list((await run.suspend("p")).state.ledger) == ids
        await run.bind("p", groups[3])
        state = (await run.apply("p", 0, ids)).state
        masters.append(await run.numbers(state.master))
        await run.suspend("p")
    assert masters[0] == pytest.approx(masters[1], rel=1e-9, abs=1e-12)


async def test_sum_and_state_keep_every_bit_over_two_one_and_four_ranks(
    four: Cluster, tiny_model: Path
) -> None:
    run = await make_run(four, tiny_model)
    first = await run.micro_batch("p", make_rows(8), batch=0)
    await run.bind("p", ["slot0", "slot1"])
    await run.compute(first)
    state = (await run.suspend("p")).state
    gradients = await run.tensors(state.gradients)
    ids = [first.micro_batch_id]
    for slots in (["slot2"], FOUR, ["slot3", "slot0"]):
        rows = make_rows(2)
        for row in rows:
            row.advantage = 0.0  # adds nothing, so the ranks write what they have loaded
        silent = await run.micro_batch("p", rows, batch=0)
        ids.append(silent.micro_batch_id)
        await run.bind("p", slots)
        await run.compute(silent)
        state = (await run.suspend("p")).state
        assert list(state.ledger) == ids
        assert same(await run.tensors(state.gradients), gradients), slots

    await run.bind("p", ["slot0", "slot1"])
    made = (await run.apply("p", 0, ids)).state
    await run.suspend("p")
    await run.commit(made)
    kinds = {kind: await run.tensors(getattr(made, kind)) for kind in ("master", "moments")}
    for batch, slots in enumerate((["slot2"], FOUR, ["slot3", "slot0"]), start=1):
        state = await set_without_a_step(run, slots, batch=batch)
        assert state.weights_hash == made.weights_hash
        for kind, expected in kinds.items():
            assert same(await run.tensors(getattr(state, kind)), expected), (slots, kind)


async def set_without_a_step(run: Run, slots: list[str], *, batch: int) -> graph_pb2.StateRecord:
    """A batch of dropped rows: the ranks write the next set of what they have loaded."""
    rows = make_rows(2)
    rows[0].advantage = 1e300
    bad = await run.micro_batch("p", rows, batch=batch)
    await run.bind("p", slots)
    assert (await run.compute(bad)).non_finite
    state = (await run.apply("p", batch, [bad.micro_batch_id])).state
    await run.suspend("p")
    await run.commit(state)
    return state


async def test_four_policies_take_turns_on_two_slots_and_the_timeline_shows_it(
    four: Cluster, tiny_model: Path
) -> None:
    names = ("a", "b", "c", "d")
    run = await four.make_run({name: {} for name in names}, dict.fromkeys(names, tiny_model))
    await run.first_commit(*names)
    records = {
        name: [await run.micro_batch(name, make_rows(4, seed=seed), batch=0) for seed in (1, 2)]
        for name in names
    }

    async def slot_of(slot: str, turns: tuple[str, ...]) -> None:
        for number, name in enumerate(turns):
            await run.bind(name, [slot])
            await run.compute(records[name][number // 2])
            await run.suspend(name)

    await asyncio.gather(slot_of("slot0", ("a", "b", "a", "b")), slot_of("slot1", ("c", "d") * 2))
    hashes = set()
    for name in names:
        await run.bind(name, ["slot0"])
        ids = [record.micro_batch_id for record in records[name]]
        hashes.add((await run.apply(name, 0, ids)).state.weights_hash)
        await run.suspend(name)
    assert len(hashes) == 4
    expected = [f"{name} {work}" for name in "cdcd" for work in ("bind", "gradients", "suspend")]
    async with asyncio.timeout(30):  # the timeline is written every two seconds
        async for _ in four.trainer.watch_status(interval_s=0.1):
            if [span.name for span in spans_of(four, run, "slot/slot1")] == expected:
                break
    spans = spans_of(four, run, "slot/slot1")
    assert all(before.end_s <= after.start_s for before, after in pairwise(spans))


def spans_of(cluster: Cluster, run: Run, track: str) -> list[Span]:
    found = [
        span
        for _, span in read_spans(cluster.folder / "trainer" / "spans")
        if span.args.get("run") == run.run_id and span.track == track
    ]
    return sorted(found, key=lambda span: span.start_s)


async def test_a_rank_that_hangs_is_named_and_its_group_ended(
    four: Cluster, tiny_model: Path
) -> None:
    run = await make_run(four, tiny_model)
    first = await run.micro_batch("p", make_rows(4), batch=0)
    second = await run.micro_batch("p", make_rows(4, seed=2), batch=0)
    await run.bind("p", FOUR[:3])
    assert (await run.compute(first)).added
    pid = await pid_of(four, "slot1")
    os.kill(pid, signal.SIGSTOP)
    with fails(ErrorReason.CHILD_DIED, match=rf"slot1 \(pid {pid}\) did not arrive"):
        await run.compute(second)
    await until_ready(four)
    assert list((await run.bind("p", FOUR[:3])).state.ledger) == []
    for record in (first, second):
        assert (await run.compute(record)).counts.num_rows == 4


async def test_a_rank_that_dies_in_mid_step_leaves_the_set_that_was(
    four: Cluster, tiny_model: Path
) -> None:
    run = await make_run(four, tiny_model)
    record = await run.micro_batch("p", make_rows(6), batch=0)
    await run.bind("p", ["slot0", "slot1"])
    await run.compute(record)
    await run.save("p")
    pid = await pid_of(four, "slot1")
    os.kill(pid, signal.SIGSTOP)  # its partner gets as far as the norm, and waits for it there
    work = asyncio.create_task(run.apply("p", 0, [record.micro_batch_id]))
    async with asyncio.timeout(30):
        async for status in four.trainer.watch_status(interval_s=0.02):
            if status.slots[0].activity == "apply":
                break
    os.kill(pid, signal.SIGKILL)
    with fails(ErrorReason.CHILD_DIED):
        await work
    await until_ready(four)
    hashes = []
    for slots in (["slot0", "slot1"], ["slot2", "slot3"]):
        if hashes:  # the same rows on ranks that nothing happened to
            run = await make_run(four, tiny_model)
            record = await run.micro_batch("p", make_rows(6), batch=0)
        state = (await run.bind("p", slots)).state
        assert (state.version, state.applied) == (0, False)
        assert (await run.compute(record)).counts.num_rows == (6 if hashes else 0)
        hashes.append((await run.apply("p", 0, [record.micro_batch_id])).state.weights_hash)
        await run.suspend("p")
    assert hashes[0] == hashes[1]


async def test_ranks_of_which_one_pass_does_not_fit_are_bound_again_with_smaller_ones(
    four: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(LOSSES)
    run = await four.make_run(
        {"p": {"loss": {"kind": "mine:hungry"}}}, {"p": tiny_model}, package=tmp_path
    )
    await run.first_commit("p")
    record = await run.micro_batch("p", make_rows(24), batch=0)
    await run.bind("p", ["slot0", "slot1"])
    with fails(ErrorReason.CHILD_DIED, match=r"ran out of memory; .* passes of \d+ tokens"):
        await run.compute(record)
    await until_ready(four)
    await run.bind("p", ["slot0", "slot1"])
    assert (await run.compute(record)).counts.num_rows == 24


async def test_state_that_does_not_fit_a_slot_is_refused_and_more_slots_mend_it(
    four: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    """Half of the state fits; nothing stays bound, and the slots are as good as before."""
    run = await make_run(four, tiny_model)
    await run.bind("p", ["slot0"])
    size = next(slot.state_bytes for slot in (await four.trainer.get_status()).slots if slot.policy)
    async with start_cluster(tmp_path, slots=2, arena_bytes=0, max_arena_bytes=size - 64) as small:
        run = await small.make_run({"p": {}}, {"p": tiny_model})
        with fails(ErrorReason.OUT_OF_MEMORY, match=r"max_arena_bytes allows .* more slots"):
            await run.bind("p", ["slot0"])
        assert {slot.policy for slot in (await small.trainer.get_status()).slots} == {""}
        await run.bind("p", ["slot1", "slot0"])
        assert (await run.suspend("p")).state.version == 0
        await small.close_runs()


async def test_cold_workers_are_fresh_after_each_binding_and_train_the_same(
    started: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    hashes = []
    async with start_cluster(tmp_path, slots=2, cold_start="true") as cold:
        for cluster in (started, cold):
            run = await make_run(cluster, tiny_model)
            pids = []
            records = [
                await run.micro_batch("p", make_rows(4, seed=seed), batch=0) for seed in (1, 2)
            ]
            for record in records:
                await run.bind("p", ["slot1"])
                pids.append(await pid_of(cluster, "slot1"))
                await run.compute(record)
                if record is records[0]:
                    await run.suspend("p")
            ids = [record.micro_batch_id for record in records]
            hashes.append((await run.apply("p", 0, ids)).state.weights_hash)
            assert (pids[0] != pids[1]) is (cluster is cold)
            await cluster.close_runs()
    assert hashes[0] == hashes[1]
