"""Dispatcher, engine host and embedded engine together: real weights, real tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout.dispatcher_harness import Cluster, Service, Services

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1.graph_pb2 import Manifest, PolicyManifest
from flexmarl.client.buffers import BufferSpec
from flexmarl.runtime.run_config import RunConfig

EXAMPLE = Path(__file__).parents[2] / "examples/quickstart"
TEAM = """
async def team(ctx, query):
    halves = await ctx.call("splitter", digits=query["digits"])
    left, right = await ctx.gather(
        ctx.call("sorter", digits=halves.text[:2], after=halves, key="left"),
        ctx.call("sorter", digits=halves.text[2:], after=halves, key="right"),
    )
    return left.text + right.text

def reward(sample):
    return float(len(sample.calls))
"""


def config_of(package: Path) -> RunConfig:
    (package / "team.py").write_text(TEAM)
    policy = {"model": {"path": str(EXAMPLE / "model"), "init": "random"}}
    return RunConfig.model_validate(
        {
            "name": "whole", "versions": 1, "dataset": {"path": "/d.jsonl"},
            "batch": {"groups": 1, "samples_per_group": 1},
            "workflow": {"package": str(package), "entry": "team:team", "reward": "team:reward"},
            "policies": {"a": policy, "b": policy},
            "agents": {
                "splitter": {"policy": "a", "prompt": "{digits}>", "max_tokens": 4},
                "sorter": {"policy": "b", "prompt": "{digits}>", "max_tokens": 2},
            },
        }
    )  # fmt: skip


async def publish(cluster: Cluster, version: int) -> Manifest:
    """Publishes random weights, as a trainer does; `version` makes them differ."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    policies = {}
    for name, policy in cluster.config.policies.items():
        torch.manual_seed(version)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy.model.path))
        wide = policy.rollout.dtype == "float64"
        dtype, torch_dtype = ("F64", torch.float64) if wide else ("F32", torch.float32)
        state = {k: v.to(torch_dtype) for k, v in model.state_dict().items()}
        specs = [BufferSpec(name=k, dtype=dtype, shape=tuple(v.shape)) for k, v in state.items()]
        key = f"{cluster.run_id}.{name}.v{version}.t1.weights"
        writer = await cluster.store.allocate_segment(cluster.run_id, key, specs)
        for tensor_name, tensor in state.items():
            writer.buffers[tensor_name].data.cast("B")[:] = bytes(tensor.numpy().tobytes())
        content_hash = writer.content_hash()
        ref = await writer.seal(checksum=content_hash)
        policies[name] = PolicyManifest(weights=ref, weights_hash=content_hash)
    return Manifest(version=version, policies=policies)


@pytest.mark.timeout(120)
async def test_a_team_rolls_out_on_real_engines(tmp_path):
    services = Services(tmp_path)
    host = Service("flexmarl.rollout", tmp_path / "host")
    try:
        await services.revive()
        host.sets = (
            "role=engine-host", f"data_dir={tmp_path / 'host/data'}",
            f"dispatcher={services.rollout.address}",
        )  # fmt: skip
        package = tmp_path / "package"
        package.mkdir()
        async with Cluster(services, config_of(package)) as cluster:
            await cluster.create_run(tmp_path / "data.jsonl")
            await host.start()
            await cluster.open()
            seen = []
            for version in (0, 1):
                manifest = await publish(cluster, version)
                await cluster.rollout.activate_version(cluster.run_id, manifest, term=cluster.term)
                await cluster.until(lambda s: s.ready, timeout_s=90)
                query = {"digits": "3102"}
                ids = await cluster.admit(version, groups=2, samples=4, query=query)
                await cluster.until_ended()
                samples = await cluster.samples(version)
                assert {samples[i].status for i in ids} == {common_pb2.SAMPLE_STATUS_DONE}
                for sample_id in ids:
                    graph = await cluster.graph(sample_id)
                    assert [v.meta.path for v in graph.vertices] == ["0:0", "0:left", "0:right"]
                    for vertex in graph.vertices:
                        meta, payload = vertex.meta, vertex.payload
                        assert meta.policy_version == version
                        assert meta.weights_hash == manifest.policies[meta.policy].weights_hash
                        assert len(payload.logprobs) == len(payload.response_tokens) > 0
                        assert all(p <= 0 for p in payload.logprobs)
                    seen.append(json.loads(graph.sample.output_json))
            assert len(set(seen)) > 4  # draws differ by seed
    finally:
        host.stop()
        services.stop()
