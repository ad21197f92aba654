"""Moves on real engines: the same tokens with and without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout.dispatcher_harness import Cluster, Service, Services
from rollout.test_rollout_whole import publish
from rollout.worker_harness import EOS, run_config, write_model, write_team
from transformers import LlamaConfig

from flexmarl.api.common.v1 import common_pb2

TEAM = """
async def team(ctx, query):
    agents = ("solve", "check") if query["n"] % 2 else ("check", "solve")
    first = await ctx.call(agents[0], text=query["n"])
    calls = [ctx.call(agents[0], text=n, after=first) for n in range(3)]
    await ctx.gather(*calls)
    return await ctx.call(agents[1], text=1, after=first)

def reward(sample):
    return 1.0
"""
AGENTS = {
    name: {"policy": policy, "prompt": "{text}>", "max_tokens": 100, "ignore_eos": True}
    for name, policy in (("solve", "p"), ("check", "q"))
}


def model_folder(folder: Path) -> Path:
    """A tokenizer and a small model with room for long responses."""
    write_model(folder)
    LlamaConfig(
        vocab_size=EOS + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        architectures=["LlamaForCausalLM"], eos_token_id=EOS,
    ).save_pretrained(folder)  # fmt: skip
    return folder


async def tokens_of(cluster: Cluster, folder: Path) -> tuple[dict[str, list[int]], int, int]:
    """Runs a batch; returns all tokens by vertex, the moves, and the vertices with boundaries."""
    await cluster.create_run(folder / "data.jsonl")
    await cluster.open()
    manifest = await publish(cluster, 0)
    await cluster.rollout.activate_version(cluster.run_id, manifest, term=cluster.term)
    await cluster.until(lambda s: s.ready, timeout_s=90)
    ids = await cluster.admit(0, groups=8, samples=2)
    status = await cluster.until_ended(timeout_s=60)
    assert {s.status for s in (await cluster.samples()).values()} == {common_pb2.SAMPLE_STATUS_DONE}
    tokens, parted = {}, 0
    for sample_id in ids:
        for vertex in (await cluster.graph(sample_id)).vertices:
            meta, payload = vertex.meta, vertex.payload
            tokens[meta.vertex_id] = list(payload.response_tokens)
            assert len(payload.logprobs) == len(payload.response_tokens) == 100
            assert sum(run.num_tokens for run in meta.version_runs) == 100
            assert {run.version for run in meta.version_runs} == {0}
            assert meta.weights_hash == manifest.policies[meta.policy].weights_hash
            parted += len(meta.version_runs) > 1
    await cluster.rollout.close_run(cluster.run_id, term=cluster.term)
    return tokens, int(status.counters.get("moves", 0)), parted


@pytest.mark.real
@pytest.mark.timeout(150)
async def test_tokens_are_the_same_with_and_without_moves(tmp_path):
    services = Services(tmp_path)
    host = Service("flexmarl.rollout", tmp_path / "host")
    package = write_team(tmp_path / "package", TEAM)
    model = model_folder(tmp_path / "model")
    # Double precision: a draw falls on the border between two tokens once in 10^15.
    rollout = {"instances": 2, "max_concurrency": 4, "dtype": "float64"}
    often = {
        "rule": "queue_gap", "queue_gap": 0, "confirm": 1, "residence_s": 0, "interval_s": 0.02,
    }  # fmt: skip
    seen = []
    try:
        await services.revive()
        host.sets = (
            "role=engine-host", f"data_dir={tmp_path / 'host/data'}",
            f"dispatcher={services.rollout.address}",
        )  # fmt: skip
        await host.start()
        for balance in ({"rule": "off"}, often):
            config = run_config(
                model, package, agents=AGENTS, rollout={"balance": balance},
                policies={name: {"rollout": rollout} for name in "pq"},
            )  # fmt: skip
            async with Cluster(services, config) as cluster:
                seen.append(await tokens_of(cluster, tmp_path))
    finally:
        host.stop()
        services.stop()
    (still, no_moves, none_parted), (moved, moves, parted) = seen
    assert (no_moves, none_parted) == (0, 0)
    assert moves > 0 and parted > 0, "nothing was handed over: the test shows nothing"
    assert moved == still
    log = (tmp_path / "rollout/log.jsonl").read_text().splitlines()
    assert len([x for x in map(json.loads, log) if x["event"] == "instance_moves"]) == moves
