"""A checkpoint of trained weights is a folder that vLLM loads: its log-probs are Hugging Face's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest
from rollout.vllm.vllm_kit import PYTHON, make_vllm_folder, needs_vllm
from trainer.service_harness import Cluster
from trainer.test_checkpoint import trained

from flexmarl.client.checkpoints import write_checkpoint
from flexmarl.core.checkpoints import CheckpointRule

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.real,
    needs_vllm,
]

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
SCORE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, text = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(folder, dtype="float32", max_model_len=64, enforce_eager=True, block_size=32,
              kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.1)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (result,) = llm.generate({"prompt_token_ids": text}, sampling)
    scores = zip(text[1:], result.prompt_logprobs[1:])
    print("SCORES", json.dumps([known[token].logprob for token, known in scores]))
"""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def scored_by_vllm(folder: Path, script: Path) -> list[float]:
    script.write_text(SCORE)
    done = subprocess.run(
        [PYTHON, str(script), str(folder), json.dumps(TEXT)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SCORES ")]
    assert lines, done.stderr[-3000:]
    scores: list[float] = json.loads(lines[0].removeprefix("SCORES "))
    return scores


def scored_by_transformers(folder: Path) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    with torch.no_grad():
        logs = lm(input_ids=torch.tensor([TEXT])).logits[0].log_softmax(-1)
    return [float(logs[place, token]) for place, token in enumerate(TEXT[1:])]


async def test_vllm_loads_a_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    model = make_vllm_folder(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "initializer_range": 0.3}))
    run = await trained(cluster, model)
    place = await write_checkpoint(
        cluster.store,
        run.run_id,
        1,
        policies=["p", "q"],
        folder=tmp_path / "checkpoints",
        cache_dir=tmp_path / "cache",
        rule=CheckpointRule(every=1, keep=1),
    )
    expected = {name: scored_by_transformers(place / name) for name in ("p", "q")}
    assert expected["p"] != pytest.approx(expected["q"], abs=1e-2)  # each its own weights
    found = await asyncio.to_thread(scored_by_vllm, place / "p", tmp_path / "score.py")
    assert found == pytest.approx(expected["p"], abs=1e-4)
