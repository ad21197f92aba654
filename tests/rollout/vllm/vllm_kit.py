"""Real vLLM on a small model: which interpreter has it, and a model that it can run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rollout.engines.engine_kit import make_model_folder

PYTHON = os.environ.get("FLEXMARL_VLLM_PYTHON", "")

needs_vllm = pytest.mark.skipif(
    not PYTHON, reason="NO vLLM TESTED: run `make vllm` and set FLEXMARL_VLLM_PYTHON"
)


def make_vllm_folder(folder: Path, *, tied: bool = False) -> Path:
    """A model of 24 tokens with a head size that vLLM's kernels have, and a tokenizer."""
    make_model_folder(folder, tied=tied)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"head_dim": 32, "bos_token_id": None, "eos_token_id": 23}
    path.write_text(json.dumps(config))
    letters = {chr(97 + i): i for i in range(24)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": letters, "unk_token": "a"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder
