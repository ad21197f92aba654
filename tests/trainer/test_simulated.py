"""Simulated devices behind the real service: the same calls, records, ledgers, states and terms."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from trainer.harness import make_rows
from trainer.service_harness import Cluster, Run, fails, start_cluster

from flexmarl.core.errors import ErrorReason

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(100)]

SCALE = 1e-4
COSTS = {
    "device": "simulated",
    "simulated.seconds_scale": SCALE,
    "simulated.policies.p.params_b": 10,
    "simulated.policies.p.tokens_per_s": 100,
    "simulated.policies.q.params_b": 20,
    "simulated.policies.q.tokens_per_s": 50,
    "simulated.policies.slow.params_b": 1,
    "simulated.policies.slow.tokens_per_s": 1e-6,
    "command_timeout_s": 6,  # the longest that a rank may stand still beside other work
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A file system of 1 MiB; None without the right to mount one."""
    folder = tmp_path_factory.mktemp("small")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(
    small: Path | None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """States lie on the small file system, in both tiers of the store; its records do not."""
    folder, memory = tmp_path_factory.mktemp("simulated"), None
    if small is not None:
        for name in ("memory", "disk"):
            (small / name).mkdir()
        (folder / "store").mkdir()
        (folder / "store" / "segments").symlink_to(small / "disk")
        memory = small / "memory"
    async with start_cluster(
        folder,
        memory=memory,
        store_settings={"store.state_to_disk_every": 0},  # a copy on disk would make room
        **COSTS,
    ) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def run(started: Cluster, tiny_model: Path) -> AsyncIterator[Run]:
    policies = ("p", "q")
    run = await started.make_run(
        {name: {} for name in policies}, dict.fromkeys(policies, tiny_model)
    )
    await run.first_commit("p", "q")
    yield run
    await started.close_runs()


async def test_work_takes_the_time_of_the_model(run: Run) -> None:
    rows = make_rows(6)
    tokens = sum(len(row.prompt) + len(row.response) for row in rows)
    record = await run.micro_batch("p", rows, batch=0)
    # Setting up left q on slot0 and nothing on slot1.
    assert (await run.bind("p", ["slot0", "slot1"])).seconds["load"] == pytest.approx(
        SCALE * (20 * 0.12 + 10 * 0.22)
    )
    result = await run.compute(record)
    assert result.seconds["forward"] == pytest.approx(SCALE * tokens / (100 * 2 * 0.9))
    assert result.metrics["ratio"] == 1.0
    await run.suspend("p")
    assert (await run.bind("p", ["slot0"])).seconds["load"] == 0.0
    applied = await run.apply("p", 0, [record.micro_batch_id])
    assert applied.seconds["step"] == pytest.approx(SCALE * 10 * 0.07)
    assert applied.state.weights_hash != run.weights_hash("p")
    await run.suspend("p")


async def test_sums_survive_swaps_and_changes_of_the_ranks(run: Run) -> None:
    masters = []
    for swapping in (False, True):
        records = [
            await run.micro_batch("pq"[swapping], make_rows(4, seed=s), batch=0) for s in (1, 2)
        ]
        policy = "pq"[swapping]
        await run.bind(policy, ["slot0"])
        start = await run.numbers(run.manifest.policies[policy].master)
        await run.compute(records[0])
        if swapping:
            await run.suspend(policy)
            await run.bind("p", ["slot0"])
            await run.suspend("p")
            await run.bind(policy, ["slot1", "slot0"])
        await run.compute(records[1])
        assert (await run.compute(records[0])).counts.num_rows == 0
        ids = [record.micro_batch_id for record in records]
        state = (await run.apply(policy, 0, ids)).state
        assert list(state.ledger) == ids
        assert state.counts.num_rows == 8
        end = await run.numbers(state.master)
        masters.append([after - before for before, after in zip(start, end, strict=True)])
        await run.suspend(policy)
    assert masters[0] == pytest.approx(masters[1], rel=1e-6)
    assert masters[0][1] == 1.0


async def test_refusals_are_those_of_real_devices(run: Run) -> None:
    rows = make_rows(3)
    for row in rows:
        row.advantage = 1.7e308  # their sum is infinite
    bad = await run.micro_batch("p", rows, batch=0)
    await run.bind("p", ["slot0"])
    old = run.terms["p"]
    assert (await run.compute(bad)).non_finite
    await run.bind("p", ["slot1"])
    with fails(ErrorReason.TERM_STALE):
        await run.compute(bad, term=old)
    with fails(ErrorReason.WEIGHTS_MISMATCH):
        await run.compute(bad, weights_hash="sha256:other")
    await run.suspend("p")


async def test_a_policy_without_costs_is_named(started: Cluster, tiny_model: Path) -> None:
    run = await started.make_run({"unknown": {}}, {"unknown": tiny_model})
    with fails(ErrorReason.INVALID_ARGUMENT, match=r"unknown.*p, q"):
        await run.bind("unknown", ["slot0"])
    await started.close_runs()


async def test_a_rank_that_takes_too_long_is_replaced(started: Cluster, tiny_model: Path) -> None:
    run = await started.make_run({"slow": {}}, {"slow": tiny_model})
    await run.first_commit("slow")
    record = await run.micro_batch("slow", make_rows(2), batch=0)
    await run.bind("slow", ["slot0", "slot1"])
    with fails(ErrorReason.DEADLINE_EXCEEDED, match="slot"):
        await run.compute(record)
    async with asyncio.timeout(60):
        async for status in started.trainer.watch_status(interval_s=0.05):
            if status.ready:
                break
    assert list((await run.bind("slow", ["slot0", "slot1"])).state.ledger) == []
    await started.close_runs()


def fill(folder: Path) -> Path:
    """Takes all the room that is left."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


async def test_a_save_and_an_update_without_room_fail_by_name_and_are_made_with_it(
    run: Run, small: Path | None
) -> None:
    """Nothing is lost, nothing half made."""
    if small is None:
        pytest.skip("a small file system needs the right to mount")
    store = run.cluster.store
    records = [await run.micro_batch("p", make_rows(4, seed=seed), batch=0) for seed in (1, 2)]
    ids = [record.micro_batch_id for record in records]
    await run.bind("p", ["slot0"])
    await run.compute(records[0])
    before = await store.get_state(run.run_id, "p")

    filler = fill(small)
    with fails(ErrorReason.DISK_FULL):
        await run.save("p")
    with fails(ErrorReason.DISK_FULL):
        await run.suspend("p")
    with fails(ErrorReason.DISK_FULL):
        await run.apply("p", 0, ids[:1])
    assert await store.get_state(run.run_id, "p") == before
    assert (await run.compute(records[0])).counts.num_rows == 0  # it still is in the sum
    assert (await run.compute(records[1])).counts.num_rows == 4  # which goes on

    filler.unlink()
    assert list((await run.save("p")).state.ledger) == ids
    state = (await run.apply("p", 0, ids)).state
    assert (state.version, state.counts.num_rows) == (1, 8)
    await run.suspend("p")
