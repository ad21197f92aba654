"""Moves on real engines: the same tokens with and without them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from rollout.dispatcher_harness import Cluster, Service, Services
from rollout.test_rollout_whole import publish
from rollout.worker_harness import EOS, run_config, write_model, write_team
from transformers import LlamaConfig

from flexmarl.api.common.v1 import common_pb2
from flexmarl.runtime.run_config import RunConfig

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


def model_folder(folder: Path, *, hidden_size: int = 32) -> Path:
    """A tokenizer and a small model with room for long responses."""
    write_model(folder)
    LlamaConfig(
        vocab_size=EOS + 1, hidden_size=hidden_size, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        architectures=["LlamaForCausalLM"], eos_token_id=EOS,
    ).save_pretrained(folder)  # fmt: skip
    return folder


async def tokens_of(
    cluster: Cluster, folder: Path, *, meanwhile: Callable[[Cluster], Awaitable[None]] | None = None
) -> tuple[dict[str, list[int]], int, int]:
    """Runs a batch; returns all tokens by vertex, the moves, and the vertices with boundaries."""
    await cluster.create_run(folder / "data.jsonl")
    await cluster.open()
    manifest = await publish(cluster, 0)
    await cluster.rollout.activate_version(cluster.run_id, manifest, term=cluster.term)
    await cluster.until(lambda s: s.ready, timeout_s=90)
    ids = await cluster.admit(0, groups=16, samples=2)
    if meanwhile is not None:
        await meanwhile(cluster)
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


# Double precision: a draw falls on the border between two tokens once in 10^15.
ROLLOUT = {"instances": 2, "max_concurrency": 4, "dtype": "float64"}
STILL = {"rule": "off"}
OFTEN = {
    "rule": "queue_gap", "queue_gap": 0, "confirm": 1, "residence_s": 0, "interval_s": 0.02,
}  # fmt: skip


async def start_host(folder: Path, services: Services, name: str) -> Service:
    host = Service(
        "flexmarl.rollout", folder / name, "role=engine-host", f"host_id={name}",
        f"data_dir={folder / name / 'data'}", f"dispatcher={services.rollout.address}",
    )  # fmt: skip
    return await host.start()


def build(folder: Path, balance: dict[str, object], *, q_base: Path | None = None) -> RunConfig:
    policies: dict[str, dict[str, object]] = {name: {"rollout": ROLLOUT} for name in "pq"}
    if q_base is not None:
        policies["q"]["model"] = {"path": str(q_base)}
    return run_config(
        model_folder(folder / "model"), write_team(folder / "package", TEAM), agents=AGENTS,
        rollout={"balance": balance}, policies=policies,
    )  # fmt: skip


def moves_in_log(folder: Path) -> list[dict[str, Any]]:
    log = (folder / "rollout/log.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, log) if line["event"] == "instance_moves"]


@pytest.mark.real
@pytest.mark.timeout(150)
async def test_tokens_are_the_same_with_and_without_moves(tmp_path):
    services, hosts = Services(tmp_path), []
    seen = []
    try:
        await services.revive()
        hosts.append(await start_host(tmp_path, services, "host"))
        for balance in (STILL, OFTEN):
            async with Cluster(services, build(tmp_path, balance)) as cluster:
                seen.append(await tokens_of(cluster, tmp_path))
    finally:
        for host in hosts:
            host.stop()
        services.stop()
    (still, no_moves, none_parted), (moved, moves, parted) = seen
    assert (no_moves, none_parted) == (0, 0)
    assert moves > 0 and parted > 0, "nothing was handed over: the test shows nothing"
    assert moved == still
    assert len(moves_in_log(tmp_path)) == moves


@pytest.mark.real
@pytest.mark.timeout(150)
async def test_tokens_are_the_same_when_a_host_dies_while_instances_move(tmp_path):
    """What was kept of a request may be lost with its host: it starts again, from nothing."""
    services, hosts = Services(tmp_path, host_grace_s=1.0), []
    seen = []

    async def kill_one(cluster: Cluster) -> None:
        await cluster.until(lambda s: s.counters["handed_over_tokens"] > 0)
        hosts[0].kill()
        assert (await cluster.status()).num_open_samples > 8
        await hosts[0].start()

    try:
        await services.revive()
        for name in ("host-a", "host-b"):
            hosts.append(await start_host(tmp_path, services, name))
        for balance, meanwhile in ((STILL, None), (OFTEN, kill_one)):
            async with Cluster(services, build(tmp_path, balance)) as cluster:
                seen.append(await tokens_of(cluster, tmp_path, meanwhile=meanwhile))
    finally:
        for host in hosts:
            host.stop()
        services.stop()
    (still, _, _), (moved, _, _) = seen
    assert moved == still


@pytest.mark.real
@pytest.mark.timeout(150)
async def test_an_instance_that_gets_another_base_model_starts_anew_and_serves_it(tmp_path):
    services, hosts = Services(tmp_path), []
    other = model_folder(tmp_path / "other", hidden_size=48)
    once = {**OFTEN, "residence_s": 60}
    seen = []
    try:
        await services.revive()
        hosts.append(await start_host(tmp_path, services, "host"))
        for balance in (STILL, once):
            async with Cluster(services, build(tmp_path, balance, q_base=other)) as cluster:
                seen.append(await tokens_of(cluster, tmp_path))
    finally:
        for host in hosts:
            host.stop()
        services.stop()
    (still, _, _), (moved, moves, _) = seen
    assert moved == still
    lines = moves_in_log(tmp_path)
    assert len(lines) == moves > 0
    assert all(line["restart"] for line in lines)
    # What an engine took to start is what the rule knows as the price.
    assert all(line["cost_s"] > 0 for line in lines)
    timeline = (tmp_path / "rollout/data/spans").rglob("*.jsonl")
    spans = [json.loads(text) for file in timeline for text in file.read_text().splitlines()]
    told = {span["args"]["reason"] for span in spans if span["track"].startswith("moves/")}
    assert lines[0]["reason"] in told
