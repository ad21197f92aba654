"""Fifteen policies on two slots, more instances than policies: whole, and of bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path

import psutil
import pytest
from integration.cluster_harness import QUICKSTART, Cluster, Size, eventually, run_cli
from integration.whole_run import assert_whole, num_reports

NAMES = tuple(f"p{number:02}" for number in range(15))
SIZE = Size(versions=3, groups=2, samples=4, calls=len(NAMES))
RUN = "fifteen"
GROWTH = 1.1
"""What a version may leave in memory: caches fill, and nothing else stays."""

TEAM = f"""
async def team(ctx, query):
    calls = [ctx.call(name, digits=query["digits"]) for name in {NAMES}]
    return await ctx.gather(*calls)


def reward(sample):
    digit = sample.query["digits"][0]
    return {{call.agent: call.text.count(digit) / 4 for call in sample.calls}}
"""


def config() -> str:
    policies = "\n".join(
        f"""
[agents.{name}]
policy = "{name}"
prompt = "{{digits}}>"
max_tokens = 4
ignore_eos = true

[policies.{name}]
model = {{ path = "model", init = "random" }}
rollout = {{ instances = {1 + (name == NAMES[0])} }}
trainer = {{ micro_batch_rows = 4 }}
"""
        for name in NAMES
    )
    return f"""
name = "fifteen"
versions = {SIZE.versions}
workflow = {{ package = "package", entry = "flow:team", reward = "flow:reward" }}
dataset = {{ path = "queries.jsonl", columns = ["digits"] }}
batch = {{ groups = {SIZE.groups}, samples_per_group = {SIZE.samples} }}
advantage = {{ scope = "agent" }}
trainer = {{ slots = 2 }}
{policies}
"""


@pytest.fixture
def cluster(tmp_path: Path):
    cluster = Cluster(tmp_path / "cluster")
    cluster.up()
    yield cluster
    cluster.down()
    assert cluster.survivors() == []


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_more_policies_than_slots_and_more_instances_than_policies(
    cluster: Cluster, tmp_path: Path
):
    run = tmp_path / "run"
    shutil.copytree(QUICKSTART.parent / "model", run / "model")
    shutil.copy(QUICKSTART.parent / "queries.jsonl", run)
    (run / "package").mkdir()
    (run / "package/flow.py").write_text(TEAM)
    (run / "config.toml").write_text(config())
    where = ("--cluster", str(cluster.folder), "--out", str(tmp_path / "out"), "--run-id", RUN)
    training = asyncio.create_task(
        asyncio.to_thread(run_cli, "train", str(run / "config.toml"), *where, timeout_s=240)
    )
    sizes: list[int] = []

    def has_ended() -> bool:
        if num_reports(tmp_path / "out" / RUN) > len(sizes):
            cluster.note_processes()
            sizes.append(memory_bytes(cluster))
        return training.done()

    await eventually(has_ended, what="the run's end", timeout_s=240)
    done = await training
    assert done.returncode == 0, done.stdout + done.stderr
    await assert_whole(cluster.address("meg_store"), RUN, SIZE, trained=NAMES)
    rows = [json.loads(line) for line in (tmp_path / "out" / RUN / "metrics.jsonl").open()]
    assert len(rows) == SIZE.versions
    assert sizes[-1] <= GROWTH * sizes[0], f"memory after each version: {sizes}"


def memory_bytes(cluster: Cluster) -> int:
    """Proportional set sizes of all processes: what several map counts once."""
    total = 0
    for pid in cluster.seen:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += psutil.Process(pid).memory_full_info().pss
    return total
