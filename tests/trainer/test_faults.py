"""What a binding does beside its work: cancels, late writers, suspension, prefetches."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio
from trainer.harness import make_rows
from trainer.service_harness import Cluster, Run, fails

from flexmarl.api.trainer.v1 import trainer_pb2
from flexmarl.core.errors import ErrorReason

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(loop_scope="session")
async def run(cluster: Cluster, tiny_model: Path) -> Run:
    run = await cluster.make_run({"p": {"optimizer": {"lr": 0.01}}}, {"p": tiny_model})
    await run.first_commit("p")
    return run


async def slots(cluster: Cluster) -> dict[str, trainer_pb2.SlotStatus]:
    return {slot.slot: slot for slot in (await cluster.trainer.get_status()).slots}


async def begin(run: Run, record, request_id: str) -> None:
    """Starts an operation under a known id, without waiting for it."""
    await run.cluster.trainer._call(
        "ComputeGradients",
        trainer_pb2.ComputeGradientsRequest(
            request_id=request_id,
            run_id=run.run_id,
            term=run.terms["p"],
            micro_batch=record,
            version=record.batch,
            weights_hash=run.weights_hash("p"),
        ),
    )


async def ended(run: Run, request_id: str) -> trainer_pb2.Operation:
    request = trainer_pb2.WaitOperationRequest(operation_id=request_id)
    response = await run.cluster.trainer._call("WaitOperation", request, timeout_s=30)
    assert response.operation.done
    return response.operation


async def test_a_cancelled_operation_ends_and_its_slots_are_free(run: Run) -> None:
    trainer = run.cluster.trainer
    long = await run.micro_batch("p", make_rows(4), batch=0)
    short = await run.micro_batch("p", make_rows(2), batch=0)
    await run.bind("p", ["slot0"])
    slot = (await slots(run.cluster))["slot0"]
    idle_s = slot.busy_s
    os.kill(slot.pid, signal.SIGSTOP)  # what it is asked to compute takes until it is let go on
    try:
        await begin(run, long, "long-1")
        await begin(run, short, "short-1")
        await trainer.cancel_operation("short-1")
        assert (await ended(run, "short-1")).failure.reason == ErrorReason.CANCELLED
        # One that waited had no effect.
        assert (await slots(run.cluster))["slot0"].policy == "p"
        async with asyncio.timeout(60):
            async for status in trainer.watch_status(interval_s=0.02):
                if status.slots[0].busy_s > idle_s:  # no longer reading rows: its rank computes
                    break
        await trainer.cancel_operation("long-1")
        await trainer.cancel_operation("long-1")
        assert (await ended(run, "long-1")).failure.reason == ErrorReason.CANCELLED
        assert (await slots(run.cluster))["slot0"].policy == ""
    finally:
        os.kill(slot.pid, signal.SIGCONT)
    with fails(ErrorReason.NOT_FOUND):
        await trainer.cancel_operation("never")
    assert list((await run.bind("p", ["slot0"])).state.ledger) == []
    assert (await run.compute(short)).counts.num_rows == 2
    await run.suspend("p")


async def test_an_old_term_that_writes_late_changes_nothing(run: Run) -> None:
    record = await run.micro_batch("p", make_rows(3), batch=0)
    await run.bind("p", ["slot0"])
    await run.compute(record)
    # Somebody else owns the policy now, and this trainer does not know it.
    await run.cluster.store.acquire_term(run.run_id, "policy/p", holder="other")
    with fails(ErrorReason.TERM_STALE):
        await run.save("p")
    state = await run.cluster.store.get_state(run.run_id, "p")
    assert state is not None
    assert list(state.ledger) == []
    assert (await slots(run.cluster))["slot0"].policy == ""


HARMS: dict[str, tuple[ErrorReason, str, Callable[[Path], object]]] = {
    "gone": (ErrorReason.SEGMENT_NOT_FOUND, "is gone", Path.unlink),
    "cut short": (
        ErrorReason.CHECKSUM_MISMATCH,
        "cut short",
        lambda path: os.truncate(path, path.stat().st_size // 2),
    ),
    "changed": (
        ErrorReason.CHECKSUM_MISMATCH,
        "has the content sha256:",
        lambda path: write(path, b"\1" * path.stat().st_size),
    ),
}


def read(path: Path) -> bytes:
    return path.read_bytes()


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


async def files_of(run: Run, key: str) -> tuple[Path, Path]:
    """A segment's file in memory and its copy on disk, once there is one."""
    async with asyncio.timeout(30):
        while True:
            async with run.cluster.store.open_segment(run.run_id, key, holder="test") as reader:
                if reader.view.disk_path:
                    return Path(reader.path), Path(reader.view.disk_path)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", ["master", "moments"])
@pytest.mark.parametrize("harm", HARMS)
async def test_state_that_cannot_be_read_is_named_and_nothing_is_half_bound(
    run: Run, kind: str, harm: str
) -> None:
    """The binding reads weights, the update moments; neither goes on with anything else."""
    reason, says, do_harm = HARMS[harm]
    record = await run.micro_batch("p", make_rows(3), batch=0)
    before = await run.cluster.store.get_state(run.run_id, "p")
    assert before is not None
    ref = getattr(before, kind)
    path, copy = await files_of(run, ref.key)
    if kind == "moments":
        await run.bind("p", ["slot0", "slot1"])
        await run.compute(record)
    whole = read(path)
    do_harm(path)
    if harm == "gone":
        do_harm(copy)
    with fails(reason, match=f"segment {re.escape(ref.key)}.*{re.escape(str(path))}.*") as caught:
        if kind == "master":
            await run.bind("p", ["slot0", "slot1"])
        else:
            await run.apply("p", 0, [record.micro_batch_id])
    assert says in str(caught.value)
    assert {slot.policy for slot in (await slots(run.cluster)).values()} == {""}
    assert await run.cluster.store.get_state(run.run_id, "p") == before
    write(path, whole)
    await run.bind("p", ["slot0", "slot1"])
    assert (await run.compute(record)).added
    assert (await run.apply("p", 0, [record.micro_batch_id])).state.version == 1
    await run.suspend("p")


async def test_state_that_is_gone_from_memory_is_loaded_from_disk(run: Run) -> None:
    record = await run.micro_batch("p", make_rows(3), batch=0)
    state = await run.cluster.store.get_state(run.run_id, "p")
    assert state is not None
    for ref in (state.master, state.moments):
        (await files_of(run, ref.key))[0].unlink()
    await run.bind("p", ["slot0", "slot1"])
    assert (await run.compute(record)).added
    assert (await run.apply("p", 0, [record.micro_batch_id])).state.version == 1
    await run.suspend("p")


async def test_suspension_leaves_nothing_in_use(run: Run) -> None:
    record = await run.micro_batch("p", make_rows(3), batch=0)
    await run.bind("p", ["slot0", "slot1"])
    await run.compute(record)
    assert (await slots(run.cluster))["slot1"].state_bytes > 0
    assert (await run.suspend("p")).metrics["used_bytes"] == 0.0
    assert (await slots(run.cluster))["slot1"].state_bytes == 0


async def test_a_prefetched_policy_is_bound_without_loading(run: Run) -> None:
    loaded = await run.cluster.trainer.prefetch_policy(run.run_id, "p", slots=["slot1"])
    assert loaded.loaded_bytes > 0
    again = await run.cluster.trainer.prefetch_policy(run.run_id, "p", slots=["slot1"])
    assert again.loaded_bytes == 0
    state = (await run.bind("p", ["slot1"])).state
    record = await run.micro_batch("p", make_rows(3), batch=0)
    assert (await run.compute(record)).added
    assert state.weights_hash == run.weights_hash("p")
    await run.suspend("p")
