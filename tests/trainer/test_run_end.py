"""A run is closed while its policies are at work: nothing of it is left, here or at the store."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from trainer.service_harness import Cluster, Run, fails, start_cluster

from flexmarl.api.trainer.v1 import trainer_pb2
from flexmarl.core.errors import ErrorReason

pytestmark = pytest.mark.timeout(120)


def costs(*, swap_s: float) -> dict[str, Any]:
    """A policy is bound at once, but where another one was before."""
    return {
        "device": "simulated",
        "simulated.swap_in_s_per_b": 0,
        "simulated.swap_out_s_per_b": swap_s,
        **{
            f"simulated.policies.{name}.{key}": value
            for name in ("p", "q")
            for key, value in {"params_b": 1, "tokens_per_s": 1e9}.items()
        },
    }


async def at_work(cluster: Cluster, tiny_model: Path) -> Run:
    """A run of which a policy is being bound: its rank is at it, its saved state under a lease."""
    run = await cluster.make_run({"p": {}, "q": {}}, dict.fromkeys(("p", "q"), tiny_model))
    states = []
    for policy, slot in (("p", "slot0"), ("q", "slot1")):
        states.append((await run.bind(policy, [slot])).state)
        await run.suspend(policy)
    await run.commit(*states)
    term = await cluster.store.acquire_term(run.run_id, "policy/p", holder="test")
    bind = trainer_pb2.BindPolicyRequest(
        request_id="bind", run_id=run.run_id, policy="p", term=term, slots=["slot1"], version=0
    )
    await cluster.trainer._call("BindPolicy", bind)
    worked_s = float("inf")
    async with asyncio.timeout(30):
        async for status in cluster.trainer.watch_status(interval_s=0.02):
            slot = {slot.slot: slot for slot in status.slots}["slot1"]
            if slot.activity != "bind" or await leases(cluster) != 1:
                continue
            if slot.busy_s > worked_s:
                return run
            worked_s = slot.busy_s
    raise AssertionError("the status ended")


async def leases(cluster: Cluster) -> float:
    return (await cluster.store.get_stats()).numbers["leases"]


async def bound(cluster: Cluster) -> trainer_pb2.Operation:
    """The operation, as it is known now."""
    request = trainer_pb2.WaitOperationRequest(operation_id="bind")
    response = await cluster.trainer._call("WaitOperation", request, timeout_s=0.5)
    return response.operation


@pytest.mark.parametrize(
    ("swap_s", "grace_s", "failure"),
    [
        pytest.param(4, 60, "", id="awaited"),
        pytest.param(3600, 0.2, ErrorReason.CANCELLED, id="ended"),
    ],
)
async def test_a_closed_run_leaves_no_work_and_no_lease(
    tmp_path: Path, tiny_model: Path, swap_s: float, grace_s: float, failure: str
) -> None:
    async with start_cluster(tmp_path, close_grace_s=grace_s, **costs(swap_s=swap_s)) as cluster:
        run = await at_work(cluster, tiny_model)
        await cluster.trainer.close_run(run.run_id, term=run.term)
        assert await leases(cluster) == 0
        operation = await bound(cluster)
        assert operation.done
        assert operation.failure.reason == failure
        # Whoever has the slots next is not kept waiting by what was under way.
        again = await cluster.make_run({"p": {}}, {"p": tiny_model})
        await again.bind("p", ["slot1"])
        with fails(ErrorReason.RUN_NOT_FOUND):
            await run.bind("p", ["slot1"])


async def test_a_trainer_that_is_told_to_stop_gives_its_leases_back(
    tmp_path: Path, tiny_model: Path
) -> None:
    async with start_cluster(tmp_path, **costs(swap_s=3600)) as cluster:
        await at_work(cluster, tiny_model)
        await cluster.trainer_service.stop(signal.SIGTERM)
        assert await leases(cluster) == 0
