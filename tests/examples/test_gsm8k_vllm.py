"""The GSM8K example on vLLM: ten versions, instances that change policies, a trainer killed.

Three policies take turns on one slot.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from gsm8k import POLICIES, dataset
from integration.cluster_harness import Cluster, Size, eventually, kill, run_cli
from integration.whole_run import assert_whole, num_reports
from rollout.vllm.vllm_kit import PYTHON, needs_vllm

from scripts.peak_memory import PeakMemory

ROOT = Path(__file__).resolve().parents[2]
RUN = "gsm8k-vllm"
SIZE = Size(versions=10, groups=2, samples=3, calls=len(POLICIES))
KILL_AFTER = 4
"""Versions that are committed before the trainer is killed in the next one's training."""

MEMORY_BOUND_BYTES = 20 << 30
GAP_BOUND = 1e-3
"""Of the trainer's log-probs to vLLM's, in float32; seen: a hundredth of it."""

PARTS = ("step_s", "step/rollout_s", "step/training_tail_s", "tokens/sampled", "team_reward")


def settings(model: Path) -> list[str]:
    """Four instances for three policies, two requests each: too few for whose turn it is."""
    changed: dict[str, object] = {
        "versions": SIZE.versions,
        "batch.groups": SIZE.groups,
        "batch.samples_per_group": SIZE.samples,
        "dataset.path": f'"{dataset()}"',
    }
    for name in POLICIES:
        changed |= {
            f"policies.{name}.model.path": f'"{model}"',
            f"policies.{name}.rollout.engine": '"vllm"',
            f"policies.{name}.rollout.instances": 1 + (name == POLICIES[0]),
            f"policies.{name}.rollout.max_concurrency": 2,
            f"policies.{name}.rollout.kv_cache_bytes": 128 << 20,
        }
    return [f"--set={key}={value}" for key, value in changed.items()]


def moves(cluster: Cluster, folder: Path) -> list[str]:
    """Instances that went to another policy, as the timeline names them."""
    out = folder / "trace.json"
    done = run_cli("timeline", RUN, "--out", str(out), "--data-dir", str(cluster.folder))
    assert done.returncode == 0, done.stderr
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    tracks = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    return [e["name"] for e in events if e["ph"] == "X" and e["pid"] == tracks.get("moves")]


def largest_gap(run: Path) -> float:
    """Of all policies and versions so far."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.open()] if path.exists() else []
    return max((row[f"train/{p}/logprob_gap_max"] for row in rows for p in POLICIES), default=0.0)


def table(rows: list[dict[str, float]]) -> str:
    """The figures that docs/gsm8k.md shows."""
    lines = []
    for row in rows:
        gaps = [row[f"train/{name}/logprob_gap"] for name in POLICIES]
        largest = max(row[f"train/{name}/logprob_gap_max"] for name in POLICIES)
        parts = " ".join(f"{key} {row[key]:.4g}" for key in PARTS)
        gap = f"log-prob gap {sum(gaps) / len(gaps):.1e} mean {largest:.1e} max"
        lines.append(f"version {row['version']:.0f}: {parts} {gap}")
    return "\n".join(lines)


@pytest.fixture
def cluster(tmp_path: Path):
    cluster = Cluster(tmp_path / "cluster")
    cluster.up(
        slots=1,
        engine_host__vllm_python=PYTHON,
        engine_host__engine_threads=1,
        trainer__threads_per_rank=2,
    )
    yield cluster
    cluster.down()
    assert cluster.outlived() == []


@needs_vllm
@pytest.mark.long
@pytest.mark.timeout(5400)
async def test_ten_versions_on_vllm_with_moves_and_a_killed_trainer(
    cluster: Cluster, tmp_path: Path
):
    out = tmp_path / "out"
    where = ("--cluster", str(cluster.folder), "--out", str(out), "--run-id", RUN)
    model = Path(os.environ["FLEXMARL_GSM8K_MODEL"])
    command = ("train", str(ROOT / "examples/gsm8k/config.toml"), *where, *settings(model))
    supervisor = int(cluster.state["pid"])
    with PeakMemory(supervisor) as memory:
        training = asyncio.create_task(asyncio.to_thread(run_cli, *command, timeout_s=5000))
        killed: list[int] = []

        def has_ended() -> bool:
            cluster.note_processes()
            assert largest_gap(out / RUN) < GAP_BOUND
            if not killed and num_reports(out / RUN) >= KILL_AFTER and trains(cluster):
                killed.append(cluster.pid("trainer"))
                kill(killed[0])
            return training.done()

        await eventually(has_ended, what="the run's end", timeout_s=5000, every_s=0.2)
        done = await training
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert killed, "the run ended before the trainer was killed"
    assert killed[0] != cluster.pid("trainer")
    assert not psutil.pid_exists(killed[0])

    await assert_whole(cluster.address("meg_store"), RUN, SIZE, trained=POLICIES)
    rows = [json.loads(line) for line in (out / RUN / "metrics.jsonl").open()]
    assert [row["version"] for row in rows] == list(range(SIZE.versions))
    assert all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    went = await asyncio.to_thread(moves, cluster, tmp_path)
    print(table(rows))
    print(f"{len(went)} moves, peak of all processes {memory.peak_bytes / 2**30:.1f} GiB")
    assert any(" to " in name for name in went), went
    assert memory.peak_bytes <= MEMORY_BOUND_BYTES


def trains(cluster: Cluster) -> bool:
    """Whether a slot computes gradients now."""
    shown = run_cli("top", RUN, "--json", "--data-dir", str(cluster.folder))
    if shown.returncode != 0:
        return False
    return any(slot["activity"] == "gradients" for slot in json.loads(shown.stdout)["slots"])
