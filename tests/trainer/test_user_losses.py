"""A loss of the run's own bundle, over the service: trained with, named when broken, never fatal.

Its loss also stands for a pass that needs too much memory: it asks for more than any machine has
when a pass has more than so many tokens, so the failure is the allocator's own, every time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer.harness import make_rows
from trainer.service_harness import Cluster, Run, fails

from flexmarl.core.errors import ErrorReason

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

LOSSES = """
import torch

def plain(inputs, config):
    return -inputs.advantage * inputs.log_ratio.exp()

def hungry(inputs, config, most=30):
    if len(inputs.current) > most:
        torch.empty(1 << 50)
    return plain(inputs, config)

def insatiable(inputs, config):
    return hungry(inputs, config, most=1)

def raises(inputs, config):
    return inputs.nothing
"""


async def started(cluster: Cluster, model: Path, folder: Path, kind: str) -> Run:
    (folder / "package").mkdir(exist_ok=True)
    (folder / "package" / "mine.py").write_text(LOSSES)
    policy: dict[str, Any] = {"loss": {"kind": kind}, "optimizer": {"lr": 0.01}}
    run = await cluster.make_run({"p": policy}, {"p": model}, package=folder / "package")
    await run.first_commit("p")
    return run


async def test_a_loss_of_the_bundle_trains_and_a_pass_that_does_not_fit_is_made_smaller(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    rows = make_rows(16)
    assert sum(len(row.response) for row in rows) == 56  # 28 in the larger of the halves
    sums = []
    for kind in ("ppo_clip", "mine:plain", "mine:hungry"):
        run = await started(cluster, tiny_model, tmp_path, kind)
        record = await run.micro_batch("p", rows, batch=0)
        await run.bind("p", ["slot0"])
        assert (await run.compute(record)).counts.num_rows == 16
        state = (await run.suspend("p")).state
        assert list(state.ledger) == [record.micro_batch_id]
        tensors = await run.tensors(state.gradients)
        sums.append(np.concatenate([tensors[name].ravel() for name in sorted(tensors)]))
    for other in sums[1:]:
        assert np.linalg.norm(other - sums[0]) <= 1e-5 * np.linalg.norm(sums[0])


async def test_a_pass_that_fits_in_no_size_is_refused_and_the_sum_is_as_it_was(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    run = await started(cluster, tiny_model, tmp_path, "mine:insatiable")
    rows = make_rows(6)
    for row in rows[:2]:
        del row.response[1:], row.logprobs[1:]
    small = await run.micro_batch("p", rows[:1], batch=0)
    large = await run.micro_batch("p", rows, batch=0)
    await run.bind("p", ["slot0"])
    assert (await run.compute(small)).added
    with fails(ErrorReason.OUT_OF_MEMORY, match=rf"{large.micro_batch_id}.*more slots"):
        await run.compute(large)
    again = await run.micro_batch("p", rows[1:2], batch=0)
    assert (await run.compute(again)).added
    state = (await run.suspend("p")).state
    assert list(state.ledger) == [small.micro_batch_id, again.micro_batch_id]


async def test_a_broken_loss_of_the_bundle_is_named(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    run = await started(cluster, tiny_model, tmp_path, "mine:raises")
    record = await run.micro_batch("p", make_rows(2), batch=0)
    await run.bind("p", ["slot0"])
    with fails(ErrorReason.LOSS_RAISED, match="mine:raises"):
        await run.compute(record)
    missing = await cluster.make_run(
        {"p": {"loss": {"kind": "mine:missing"}}}, {"p": tiny_model}, package=tmp_path / "package"
    )
    with fails(ErrorReason.WORKFLOW_IMPORT_FAILED, match="mine has no function missing"):
        await missing.bind("p", ["slot0"])
