"""What is proved of ranks on CPUs, once more on GPUs: exact sums, swaps, NCCL, kills.

    pytest tests/trainer -m gpu

The proofs themselves are imported; here they get ranks on other devices. Those of two ranks need
two GPUs: NCCL has no group of two on one device.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from trainer import (
    test_gradient_exact,
    test_handover,
    test_memory,
    test_rank_worker,
    test_service_kills,
)
from trainer.harness import Ranks, start_ranks
from trainer.service_harness import Cluster, Run, start_cluster

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.gpu,
]

DEVICE = "cuda"
ONE, TWO = [0], [1, 0]
DTYPES = pytest.mark.parametrize("dtype", test_gradient_exact.TOLERANCE)
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ranks]:
    async with start_ranks(1, tmp_path_factory.mktemp("one"), device=DEVICE) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ranks]:
    async with start_ranks(2, tmp_path_factory.mktemp("two"), device=DEVICE) as started:
        yield started


@DTYPES
async def test_the_sum_is_exact(one_gpu: Ranks, tiny_model: Path, dtype: str) -> None:
    await test_gradient_exact.test_sum_equals_one_pass_whatever_the_split(
        one_gpu, tiny_model, dtype, ONE, "token_mean"
    )


async def test_divergence_and_correction_are_exact(one_gpu: Ranks, tiny_model: Path) -> None:
    await test_gradient_exact.test_divergence_and_correction_are_exact(one_gpu, tiny_model, ONE)


async def test_layers_that_are_computed_again_give_the_same(one_gpu: Ranks, tmp_path: Path) -> None:
    await test_gradient_exact.test_checkpointed_layers_give_the_same_gradient(
        one_gpu, tmp_path, ONE
    )


async def test_a_larger_model_is_scored_in_chunks(one_gpu: Ranks, tmp_path: Path) -> None:
    await test_gradient_exact.test_a_larger_model_is_sharded_by_layer_and_scored_in_chunks(
        one_gpu, tmp_path, ONE
    )


async def test_policies_that_take_turns_never_touch_each_other(
    one_gpu: Ranks, tiny_model: Path
) -> None:
    await test_rank_worker.test_policies_that_take_turns_on_a_slot_never_touch_each_other(
        one_gpu, tiny_model
    )


async def test_updates_go_on_after_a_resume(one_gpu: Ranks, tiny_model: Path) -> None:
    await test_rank_worker.test_updates_go_on_after_a_resume_as_if_nothing_had_been(
        one_gpu, tiny_model, ONE
    )


async def test_the_next_policys_state_is_loaded_beside(one_gpu: Ranks, tiny_model: Path) -> None:
    await test_memory.test_the_next_policys_state_is_loaded_while_the_present_one_computes(
        one_gpu, tiny_model
    )


async def test_moments_stay_out_of_swaps(one_gpu: Ranks, tiny_model: Path) -> None:
    await test_memory.test_moments_stay_out_of_swaps_until_the_update(one_gpu, tiny_model, ONE)


@needs_two
@DTYPES
async def test_the_sum_of_two_ranks_is_exact(two_gpus: Ranks, tiny_model: Path, dtype: str) -> None:
    await test_gradient_exact.test_sum_equals_one_pass_whatever_the_split(
        two_gpus, tiny_model, dtype, TWO, "token_mean"
    )


@needs_two
async def test_ranks_change_between_micro_batches(two_gpus: Ranks, tiny_model: Path) -> None:
    exact: Any = test_gradient_exact
    await exact.test_suspending_and_changing_the_ranks_between_micro_batches_changes_nothing(
        two_gpus, tiny_model
    )
    await exact.test_state_of_two_ranks_loads_on_one_and_back_bit_for_bit(two_gpus, tiny_model)


@needs_two
async def test_state_goes_from_device_to_device(two_gpus: Ranks, tiny_model: Path) -> None:
    await test_handover.test_state_goes_from_worker_to_worker_beside_what_those_do(
        two_gpus, tiny_model
    )


async def test_a_killed_rank_costs_what_was_not_saved(tmp_path: Path, tiny_model: Path) -> None:
    """The service as it is, with its swaps verified, on one device."""
    async with start_cluster(tmp_path, slots=1, device=DEVICE) as cluster:
        run = await started(cluster, tiny_model)
        await test_service_kills.test_a_killed_rank_costs_what_was_not_saved_and_no_more(
            cluster, run, tiny_model
        )
        await cluster.close_runs()


async def started(cluster: Cluster, model: Path) -> Run:
    run = await cluster.make_run({"p": {"optimizer": {"lr": 0.01}}}, {"p": model})
    await run.first_commit("p")
    return run
