"""Memory that a rank takes for a model of a real size, through store and trainer as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from trainer.harness import Row, write_model
from trainer.service_harness import start_cluster

from scripts.peak_memory import PeakMemory, own_bytes

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(1200), pytest.mark.long]

SMOLLM_135M = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "initializer_range": 0.02,
    "max_position_embeddings": 2048,
}  # fmt: skip
ROWS, PROMPT, RESPONSE = 8, 128, 128
GIB = 1 << 30


def rows() -> list[Row]:
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, SMOLLM_135M["vocab_size"], count)]

    return [
        Row(tokens(PROMPT), tokens(RESPONSE), [-10.8] * RESPONSE, advantage=float(rng.normal()))
        for _ in range(ROWS)
    ]


async def test_eight_rows_of_256_tokens_of_a_135m_policy_take_less_than_four_gib(
    tmp_path: Path, proves: Callable[[str], None]
) -> None:
    """First weights, binding, gradient and update, with no setting of the policy changed."""
    model = write_model(tmp_path / "m", **SMOLLM_135M)
    async with start_cluster(
        tmp_path / "cluster", slots=1, verify_swaps="false", collective_timeout_s=300
    ) as cluster:
        run = await cluster.make_run({"p": {}}, {"p": model})
        (slot,) = (await cluster.trainer.get_status()).slots
        with PeakMemory(slot.pid, size=own_bytes, interval_s=0.02) as memory:
            await run.first_commit("p")
            record = await run.micro_batch("p", rows(), batch=0)
            await run.bind("p", ["slot0"])
            assert (await run.compute(record)).counts.num_tokens == ROWS * RESPONSE
            await run.apply("p", 0, [record.micro_batch_id])
        await run.suspend("p")
    peak = memory.peak_bytes
    proves(f"8 rows of 256 tokens of a 135M policy: {peak / GIB:.2f} GiB at most")
    assert 1 * GIB < peak < 4 * GIB
