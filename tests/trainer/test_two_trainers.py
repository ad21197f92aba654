"""Two trainers of one run on one node: each serves other policies, and a policy goes over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trainer.harness import make_rows
from trainer.service_harness import Cluster, Run, Service, fails, start_cluster

from flexmarl.client.trainer import TrainerClient
from flexmarl.core.errors import ErrorReason

SECTIONS = {"optimizer": {"lr": 0.01}}


@asynccontextmanager
async def second_trainer(first: Cluster) -> AsyncIterator[Cluster]:
    """The same store, another trainer; its slot has the name that the first one's has."""
    service = Service(
        "flexmarl.trainer",
        first.folder / "trainer2",
        data_dir=first.folder / "trainer2",
        slots='["slot0"]',
        verify_swaps="true",
    )
    await service.start()
    try:
        async with TrainerClient.connect(service.address) as trainer:
            yield replace(first, trainer_service=service, trainer=trainer)
    finally:
        await service.stop()


@pytest.mark.real
@pytest.mark.timeout(300)
async def test_two_trainers_serve_policies_of_one_run_and_a_policy_goes_over(
    tmp_path: Path, tiny_model: Path
) -> None:
    async with start_cluster(tmp_path, slots=1) as cluster, second_trainer(cluster) as other:
        models = dict.fromkeys(("p", "q"), tiny_model)
        masters = []
        for where in (cluster, other):
            run = await cluster.make_run(dict.fromkeys(models, SECTIONS), models)
            await run.first_commit("p", "q")
            there = replace(run, cluster=where)  # what is known of the run is shared
            if where is other:
                await other.trainer.open_run(run.run_id, term=run.term, shards=run.shards)
            masters.append(await one_update(run, there))
            await where.close_runs()
        for alone, shared in zip(*masters, strict=True):
            assert all(np.array_equal(alone[name], shared[name]) for name in alone)


async def one_update(here: Run, there: Run) -> list[dict[str, np.ndarray]]:
    """Masters after an update of p here and of q there; half of q's gradients are made here."""
    q1, q2, p1 = [
        await here.micro_batch(policy, make_rows(6, seed=seed), batch=0)
        for seed, policy in enumerate(("q", "q", "p"))
    ]
    await here.bind("q", ["slot0"])
    assert (await here.compute(q1)).added
    late = here.terms["q"]
    await here.suspend("q")
    apart = here.cluster is not there.cluster
    await there.bind("q", ["slot0"])
    if apart:  # both slots are at work
        await here.bind("p", ["slot0"])
        await asyncio.gather(here.compute(p1), there.compute(q2))
    else:
        await there.compute(q2)
    with fails(ErrorReason.TERM_STALE, ErrorReason.STATE_TRANSITION_REFUSED):
        await here.compute(q2, term=late)
    q = (await there.apply("q", 0, [q1.micro_batch_id, q2.micro_batch_id])).state
    await there.suspend("q")
    if not apart:
        await here.bind("p", ["slot0"])
        await here.compute(p1)
    p = (await here.apply("p", 0, [p1.micro_batch_id])).state
    await here.suspend("p")
    return [await here.tensors(state.master) for state in (p, q)]
