"""I6, E7: the sum does not depend on split, order, suspensions or ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from trainer import reference
from trainer.harness import (
    Policy,
    Ranks,
    flat,
    make_rows,
    policy_config,
    read,
    saved,
    write_model,
)

from flexmarl.core.ledger import Aggregation
from flexmarl.runtime.algorithm_config import LOSS_KINDS
from flexmarl.trainer.rank.scoring import LOGITS_PER_CHUNK

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
SPLITS = {  # rows per micro-batch, and whether the last one comes first
    "one": ([24], False),
    "equal": ([8, 8, 8], True),
    "uneven": ([1, 13, 3, 7], False),
}


@pytest.mark.parametrize("members", [[0], [1, 0]], ids=["one_rank", "two_ranks"])
@pytest.mark.parametrize(
    ("dtype", "aggregation"),
    [("float64", "token_mean"), ("float64", "seq_mean_token_mean"), ("float32", "token_mean")],
)
async def test_sum_equals_one_pass_whatever_the_split(
    ranks: Ranks, tiny_model: Path, dtype: str, members: list[int], aggregation: str
) -> None:
    rows = make_rows(24, seed=1)
    config = policy_config(
        tiny_model,
        loss={"aggregation": aggregation, "entropy": 0.1},
        trainer={"compute_dtype": dtype, "max_tokens_per_pass": 60},
    )
    policy = Policy(ranks, config, tiny_model, members)
    await policy.bind()
    state = await policy.export("master", "moments")
    lm = reference.build(tiny_model, read(state["master"]), getattr(torch, dtype))
    expected = reference.gradient(lm, rows, aggregation=aggregation, entropy=0.1)

    for name, (split, reverse) in SPLITS.items():
        cuts = np.split(np.arange(24), np.cumsum(split)[:-1])
        await policy.bind(saved(state["master"], state["moments"]))
        for number, cut in enumerate(reversed(cuts) if reverse else cuts):
            replies = await policy.add([rows[index] for index in cut], f"m{number}")
            assert all(reply.finite for reply in replies)
            tokens = sum(len(rows[index].response) for index in cut)
            assert sum(reply.num_tokens for reply in replies) == tokens
        got = flat((await policy.export("gradients"))["gradients"])
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error <= TOLERANCE[dtype], (name, error)


def every_loss() -> Iterator[Any]:
    """All losses, aggregations and dtypes.

    Summed and not yet divided, every aggregation but the mean of means weighs tokens alike: those
    that differ, and each loss in float32, are proved at every change; the whole grid beside.
    """
    usual = {
        ("token_mean", "float64"),
        ("seq_mean_token_mean", "float64"),
        ("token_mean", "float32"),
    }
    for kind, aggregation, dtype in product(LOSS_KINDS, get_args(Aggregation), TOLERANCE):
        marks = () if (aggregation, dtype) in usual else pytest.mark.real
        yield pytest.param(kind, aggregation, dtype, marks=marks)


@pytest.mark.parametrize(("kind", "aggregation", "dtype"), list(every_loss()))
async def test_every_loss_under_every_aggregation_is_exact(
    ranks: Ranks, tiny_model: Path, kind: str, aggregation: str, dtype: str
) -> None:
    """Random rows, ratios far from 1, a random split in a random order, a suspension in it."""
    rng = np.random.default_rng(zlib.crc32(f"{kind} {aggregation} {dtype}".encode()))
    rows = make_rows(20, seed=int(rng.integers(1 << 30)))
    members = [[0], [1, 0]][int(rng.integers(2))]
    config = policy_config(
        tiny_model,
        loss={
            "kind": kind,
            "aggregation": aggregation,
            "old": "behaviour",
            "entropy": 0.1,
            "response_limit": 6,
        },
        trainer={"compute_dtype": dtype, "max_tokens_per_pass": int(rng.integers(20, 80))},
    )
    policy = Policy(ranks, config, tiny_model, members)
    await policy.bind()
    state = await policy.export("master", "moments")
    lm = reference.build(tiny_model, read(state["master"]), getattr(torch, dtype))
    expected = reference.gradient(
        lm, rows, aggregation=aggregation, entropy=0.1, kind=kind, old="behaviour"
    )
    order = rng.permutation(20)
    cuts = np.sort(rng.choice(np.arange(1, 20), size=3, replace=False))
    for number, part in enumerate(np.split(order, cuts)):
        await policy.add([rows[index] for index in part], f"m{number}")
        if number == 1:
            gradients = (await policy.export("gradients"))["gradients"]
            await policy.unbind()
            await policy.bind(saved(*state.values(), gradients))
    got = flat((await policy.export("gradients"))["gradients"])
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error <= TOLERANCE[dtype], error


@pytest.mark.parametrize("members", [[0], [1, 0]], ids=["one_rank", "two_ranks"])
async def test_divergence_and_correction_are_exact(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    """The reference moves in for one scoring pass and leaves the weights as they were."""
    rows = make_rows(20, seed=7)
    config = policy_config(
        tiny_model,
        loss={"kl": {"coefficient": 0.3}, "correction_cap": 1.5},
        trainer={"compute_dtype": "float64", "max_tokens_per_pass": 60},
        optimizer={"lr": 0.05},
    )
    policy = Policy(ranks, config, tiny_model, members)
    await policy.bind()
    first = read((await policy.export("master"))["master"])
    await policy.add(rows[:10])
    moved, _ = await policy.apply(10.0)  # the weights leave the reference
    await policy.bind(saved(moved["master"], moved["moments"]))
    replies = []
    for cut in (rows[:3], rows[3:16], rows[16:]):
        replies += await policy.add(cut)
    got = flat((await policy.export("gradients"))["gradients"])
    after = await policy.export("master")
    assert np.array_equal(flat(after["master"]), flat(moved["master"]))

    lm = reference.build(tiny_model, read(moved["master"]), torch.float64)
    expected = reference.gradient(
        lm,
        rows,
        aggregation="token_mean",
        cap=1.5,
        kl=0.3,
        first=reference.build(tiny_model, first, torch.float64),
    )
    assert np.linalg.norm(got - expected) <= 1e-10 * np.linalg.norm(expected)
    assert sum(reply.sums["kl"] for reply in replies) > 0
    assert all(reply.seconds["reference"] > 0 for reply in replies)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "olmo2"])
async def test_other_models_are_as_exact(
    ranks: Ranks, tmp_path: Path, kind: str, tied: bool
) -> None:
    """Biases in attention, norms of queries and keys, a window shorter than the rows, and a last
    layer of which nothing is known.
    """
    changes = {"architectures": None, "model_type": kind, "tie_word_embeddings": tied}
    if kind == "mistral":
        changes["sliding_window"] = 4
    model = write_model(tmp_path / "m", head_dim=16, **changes)
    rows = make_rows(12, seed=4)
    config = policy_config(
        model,
        loss={"entropy": 0.1},
        trainer={"compute_dtype": "float64", "max_tokens_per_pass": 40},
    )
    policy = Policy(ranks, config, model, [0, 1])
    await policy.bind()
    state = await policy.export("master")
    lm = reference.build(model, read(state["master"]), torch.float64)
    expected = reference.gradient(lm, rows, aggregation="token_mean", entropy=0.1)
    await policy.add(rows)
    got = flat((await policy.export("gradients"))["gradients"])
    assert np.linalg.norm(got - expected) <= 1e-10 * np.linalg.norm(expected)


@pytest.mark.parametrize("members", [[0], [1, 0]], ids=["one_rank", "two_ranks"])
async def test_checkpointed_layers_give_the_same_gradient(
    ranks: Ranks, tmp_path: Path, members: list[int]
) -> None:
    model = write_model(tmp_path / "m", vocab_size=300_000, hidden_size=16)  # a unit per layer
    rows = make_rows(5, seed=9, vocab=300_000)
    sums = []
    for checkpointing in (False, True):
        config = policy_config(model, trainer={"gradient_checkpointing": checkpointing})
        policy = Policy(ranks, config, model, members)
        await policy.bind()
        await policy.add(rows)
        sums.append(flat((await policy.export("gradients"))["gradients"]))
        await policy.unbind()
    assert np.linalg.norm(sums[1] - sums[0]) <= 1e-6 * np.linalg.norm(sums[0])


async def test_suspending_and_changing_the_ranks_between_micro_batches_changes_nothing(
    ranks: Ranks, tiny_model: Path
) -> None:
    rows = make_rows(30, seed=2)
    config = policy_config(tiny_model, trainer={"compute_dtype": "float64"})
    placements = [[0], [1, 0], [1]]
    policies = [Policy(ranks, config, tiny_model, members) for members in placements]
    await policies[0].bind()
    state = await policies[0].export("master", "moments")
    lm = reference.build(tiny_model, read(state["master"]), torch.float64)
    expected = reference.gradient(lm, rows, aggregation="token_mean", entropy=0.0)

    carried = [state["master"], state["moments"]]
    for policy, start in zip(policies, (0, 10, 20), strict=True):
        await policy.bind(saved(*carried))
        await policy.add(rows[start : start + 10])
        carried[2:] = [(await policy.export("gradients"))["gradients"]]
        await policy.unbind()

    got = flat(carried[2])
    assert np.linalg.norm(got - expected) <= 1e-10 * np.linalg.norm(expected)


async def test_state_of_two_ranks_loads_on_one_and_back_bit_for_bit(
    ranks: Ranks, tiny_model: Path
) -> None:
    config = policy_config(tiny_model, optimizer={"lr": 0.01})
    two = Policy(ranks, config, tiny_model, [0, 1])
    await two.bind()
    await two.add(make_rows(8))
    targets, _ = await two.apply(8.0)
    first = {kind: flat(segment) for kind, segment in targets.items()}
    assert np.any(first["moments"])

    for members in ([1], [1, 0], [0]):
        policy = Policy(ranks, config, tiny_model, members)
        await policy.bind(saved(targets["master"], targets["moments"]))
        again = await policy.export("weights", "master", "moments")
        for kind, values in first.items():
            assert np.array_equal(flat(again[kind]), values), (members, kind)


@pytest.mark.parametrize("members", [[0], [1, 0]], ids=["one_rank", "two_ranks"])
async def test_a_larger_model_is_sharded_by_layer_and_scored_in_chunks(
    ranks: Ranks, tmp_path: Path, members: list[int]
) -> None:
    """Large enough for a unit per layer, and a vocabulary of several chunks of logits."""
    vocab = 1_000_000
    model = write_model(tmp_path / "m", vocab_size=vocab, hidden_size=16, initializer_range=0.1)
    rows = make_rows(8, seed=5, vocab=vocab)
    assert sum(len(row.response) for row in rows) > LOGITS_PER_CHUNK // vocab
    policy = Policy(ranks, policy_config(model), model, members)
    await policy.bind()
    state = await policy.export("master")
    lm = reference.build(model, read(state["master"]), torch.float32)
    expected = reference.gradient(lm, rows, aggregation="token_mean", entropy=0.0)
    await policy.add(rows)
    got = flat((await policy.export("gradients"))["gradients"])
    await policy.unbind()
    assert np.linalg.norm(got - expected) <= 1e-5 * np.linalg.norm(expected)
