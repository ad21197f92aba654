"""One step of the GSM8K example: three real language models, four services, one device slot."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gsm8k import POLICIES, dataset
from safetensors.torch import load_file

from scripts.peak_memory import PeakMemory

ROOT = Path(__file__).resolve().parents[2]
MEMORY_BOUND_BYTES = 16 << 30
MAX_TOKENS = {"solver": 48, "verifier": 12, "refiner": 48}
"""Half of what the example allows: sampling token after token is most of this test's time."""


@pytest.mark.real
@pytest.mark.timeout(900)
def test_one_step_on_real_models(tmp_path: Path) -> None:
    model = Path(os.environ["FLEXMARL_GSM8K_MODEL"])
    command = [
        str(Path(sys.executable).with_name("flexmarl")),
        "train",
        "examples/gsm8k/config.toml",
        f"--out={tmp_path / 'runs'}",
        f"--data-dir={tmp_path / 'cluster'}",
        "--run-id=gsm8k",
        "--service-set=engine_host.engine_threads=2",
        "--service-set=trainer.threads_per_rank=2",
        "--set=versions=1",
        *(f"--set=agents.{name}.max_tokens={number}" for name, number in MAX_TOKENS.items()),
        f'--set=dataset.path="{dataset()}"',
        *(f'--set=policies.{name}.model.path="{model}"' for name in POLICIES),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        with PeakMemory(process.pid) as memory:
            output, _ = process.communicate(timeout=840)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, output[-5000:]
    assert 0 < memory.peak_bytes <= MEMORY_BOUND_BYTES

    folder = tmp_path / "runs/gsm8k"
    (numbers,) = (json.loads(line) for line in (folder / "metrics.jsonl").open())
    assert all(math.isfinite(v) for v in numbers.values() if isinstance(v, int | float))
    assert math.isfinite(numbers["team_reward"])
    base = load_file(model / "model.safetensors")
    # Which samples a policy has, the processor's rounding decides: all may have earned the same.
    learnt = [name for name in POLICIES if numbers[f"train/{name}/grad_norm"]]
    assert learnt
    for name in POLICIES:
        assert numbers[f"rows_consumed/{name}"] + numbers[f"rows_void/{name}"] == 8
        trained = load_file(folder / "policies" / name / "model.safetensors")
        changed = [
            key for key, tensor in trained.items() if not tensor.equal(base[key].to(tensor.dtype))
        ]
        assert bool(changed) == (name in learnt), f"{name}: weights changed: {bool(changed)}"
        assert all(tensor.isfinite().all() for tensor in trained.values())
