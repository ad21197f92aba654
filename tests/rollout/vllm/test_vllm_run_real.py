"""A run on vLLM instances, one of which is killed in the middle: it trains on (I12)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rollout.vllm.vllm_kit import PYTHON, needs_vllm

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), needs_vllm]

FLEXMARL = str(Path(sys.executable).with_name("flexmarl"))
QUICKSTART = Path(__file__).parents[3] / "examples/quickstart"

CONFIG = """
name = "on-vllm"
versions = {versions}
workflow = {{ package = "{quickstart}", entry = "team:team", reward = "team:reward" }}
dataset = {{ path = "{quickstart}/queries.jsonl" }}
batch = {{ groups = 8, samples_per_group = 4 }}
advantage = {{ scope = "call_site", normalize_std = false }}
agents.splitter = {{ policy = "p", prompt = "{{digits}}>", max_tokens = 4 }}
agents.sorter = {{ policy = "p", prompt = "{{digits}}>", max_tokens = 2 }}
agents.merger = {{ policy = "p", prompt = "{{left}}>{{right}}>", max_tokens = 4 }}

[policies.p]
model = {{ path = "{quickstart}/model", init = "random" }}
optimizer = {{ lr = 3e-3 }}
rollout = {{ engine = "vllm", instances = 2, max_concurrency = 16, kv_cache_bytes = 67108864 }}
trainer = {{ micro_batch_rows = 64 }}
"""

VERSIONS = 3


def committed(metrics: Path) -> list[dict]:
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def servers(pid: int) -> list[psutil.Process]:
    """The vLLM servers below a process."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # others come and go
            if any(part.endswith("vllm_plugin/launch.py") for part in process.cmdline()):
                found.append(process)
    return found


def test_a_run_on_vllm_survives_the_death_of_an_instance(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(versions=VERSIONS, quickstart=QUICKSTART))
    out, data = tmp_path / "out", tmp_path / "data"
    log = tmp_path / "log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            [
                FLEXMARL, "train", str(config),
                "--out", str(out), "--data-dir", str(data),
                "--service-set", f"engine_host.vllm_python={PYTHON}",
            ],
            stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        killed: list[psutil.Process] = []
        deadline = time.monotonic() + 540
        while run.poll() is None:
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            found = list(out.rglob("metrics.jsonl"))
            if not killed and found and committed(found[0]):
                killed = servers(run.pid)[:1]
                os.kill(killed[0].pid, signal.SIGKILL)
            time.sleep(0.05)
        assert run.returncode == 0, log.read_text()[-3000:]
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
        # What is stored would stay in memory, wherever the folder goes.
        subprocess.run(
            [FLEXMARL, "down", "--purge", "--data-dir", str(data)], check=True, timeout=60
        )
    assert killed, "the run ended before an instance was killed"
    (metrics,) = out.rglob("metrics.jsonl")
    rows = committed(metrics)
    assert len(rows) == VERSIONS
