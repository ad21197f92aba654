"""I6 over one, two and four ranks: random splits, orders, suspensions, and ranks in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import pytest_asyncio
import torch
from trainer import reference
from trainer.harness import Policy, Ranks, flat, make_rows, policy_config, read, saved, start_ranks
from trainer.test_gradient_exact import TOLERANCE

from flexmarl.core.ledger import Aggregation
from flexmarl.runtime.algorithm_config import LOSS_KINDS

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.real,
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def four(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ranks]:
    async with start_ranks(4, tmp_path_factory.mktemp("segments")) as started:
        yield started


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", range(8))
async def test_the_sum_is_one_passs_whatever_ranks_form_it(
    four: Ranks, tiny_model: Path, seed: int, dtype: str
) -> None:
    """Each part of a random order is formed by ranks drawn anew, one, two or four of them."""
    rng = np.random.default_rng(seed)
    rows = make_rows(30, seed=seed)
    kind, aggregation = rng.choice(LOSS_KINDS), rng.choice(get_args(Aggregation))
    config = policy_config(
        tiny_model,
        loss={
            "kind": str(kind), "aggregation": str(aggregation), "old": "behaviour",
            "entropy": 0.1, "response_limit": 6,
        },
        trainer={"compute_dtype": dtype, "max_tokens_per_pass": int(rng.integers(20, 80))},
    )  # fmt: skip
    first = Policy(four, config, tiny_model, [0])
    await first.bind()
    state = await first.export("master", "moments")
    await first.unbind()
    lm = reference.build(tiny_model, read(state["master"]), getattr(torch, dtype))
    expected = reference.gradient(
        lm, rows, aggregation=str(aggregation), entropy=0.1, kind=str(kind), old="behaviour"
    )
    order, num_parts = rng.permutation(30), 6
    cuts = np.sort(rng.choice(np.arange(1, 30), size=num_parts - 1, replace=False))
    # Every number of ranks, and every change between them, in one seed or another.
    sizes = [4, 2, 1, *rng.choice([1, 2, 4], size=num_parts - 3)]
    rng.shuffle(sizes)
    for number, (start, stop) in enumerate(pairwise([0, *cuts, 30])):
        members = rng.permutation(4)[: sizes[number]].tolist()
        policy = Policy(four, config, tiny_model, members)
        await policy.bind(saved(*state.values()))
        replies = await policy.add([rows[index] for index in order[start:stop]], f"m{number}")
        assert all(reply.finite for reply in replies)
        state |= await policy.export("gradients")
        await policy.unbind()
    got = flat(state["gradients"])
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error <= TOLERANCE[dtype], (sizes, kind, aggregation, error)
