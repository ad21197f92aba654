"""A conversation as one row has the gradient of its turns as rows of their own (I6 with masks)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trainer.harness import Policy, Ranks, Row, flat, policy_config

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.trainer.rows import pack_rows

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]


def conversation(rng: np.random.Generator, name: str) -> list[graph_pb2.Vertex]:
    """One to four turns, each prompt going on from the one before."""
    turns: list[graph_pb2.Vertex] = []
    said: list[int] = []
    for number in range(int(rng.integers(1, 5))):
        prompt = [*said, *rng.integers(0, 7, rng.integers(1, 4)).tolist()]
        response = rng.integers(0, 7, rng.integers(1, 4)).tolist()
        meta = graph_pb2.VertexMeta(
            vertex_id=f"{name}/0:{number}",
            policy="p",
            weights_hash="w",
            version_runs=[common_pb2.VersionRun(num_tokens=len(response))],
            advantage=float(rng.normal()),
        )
        payload = graph_pb2.VertexPayload(
            prompt_tokens=prompt,
            response_tokens=response,
            logprobs=(-rng.random(len(response)) * 3).tolist(),
            temperature=1.0,
        )
        turns.append(graph_pb2.Vertex(meta=meta, payload=payload))
        said = [*prompt, *response]
    for turn in turns[:-1]:
        turn.meta.merged_into = turns[-1].meta.vertex_id
    return turns


@pytest.mark.parametrize("members", [[0], [1, 0]], ids=["one_rank", "two_ranks"])
async def test_one_row_per_conversation_has_the_gradient_of_its_turns(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    rng = np.random.default_rng(5)
    vertices = [turn for n in range(8) for turn in conversation(rng, f"s{n}")]
    config = policy_config(
        tiny_model,
        loss={"aggregation": "token_mean", "entropy": 0.1, "old": "behaviour"},
        trainer={"compute_dtype": "float64", "max_tokens_per_pass": 64},
    )
    policy = Policy(ranks, config, tiny_model, members)
    await policy.bind()
    alone = [
        Row(
            list(v.payload.prompt_tokens),
            list(v.payload.response_tokens),
            list(v.payload.logprobs),
            v.meta.advantage,
        )
        for v in vertices
    ]
    replies = await policy.add(alone, "turns")
    expected = flat((await policy.export("gradients"))["gradients"])
    num_tokens = sum(reply.num_tokens for reply in replies)
    await policy.unbind()

    packed = pack_rows(
        vertices,
        micro_batch=graph_pb2.MicroBatch(micro_batch_id="games", policy="p"),
        version=0,
        weights_hash="w",
        num_updates=0,
    )
    assert packed.counts.num_rows == 8
    assert packed.counts.num_tokens == num_tokens == sum(len(row.response) for row in alone)
    await policy.bind()
    replies = [r.added for r in await ranks.call(members, gradients=packed.command)]
    assert all(reply.finite for reply in replies)
    assert sum(reply.num_tokens for reply in replies) == num_tokens
    got = flat((await policy.export("gradients"))["gradients"])
    assert np.linalg.norm(got - expected) <= 1e-10 * np.linalg.norm(expected)
