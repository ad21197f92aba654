"""The bound of a pass: what the config says, or what the device and the model ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from flexmarl.core.activations import MAX_TOKENS
from flexmarl.runtime.policy_config import PolicyTrainerConfig
from flexmarl.trainer.rank.pass_size import max_tokens_of

SMOLLM_135M = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3,
)  # fmt: skip


def bound(config: Any, *, device: str = "cpu", **trainer: Any) -> int:
    model = cast("Any", SimpleNamespace(lm=SimpleNamespace(config=config)))
    settings = PolicyTrainerConfig.model_validate(trainer)
    return max_tokens_of(model, settings, device=torch.device(device))


def test_a_named_bound_holds():
    assert bound(SMOLLM_135M, max_tokens_per_pass=7000) == 7000


def test_on_a_cpu_memory_bounds_a_pass_and_a_gpu_says_itself():
    assert 256 <= bound(SMOLLM_135M) < 512
    assert bound(SMOLLM_135M, compute_dtype="float64") <= bound(SMOLLM_135M) / 2 + 1
    assert bound(SMOLLM_135M, gradient_checkpointing=True) > 2048
    assert bound(SMOLLM_135M, device="cuda") == MAX_TOKENS


@pytest.mark.parametrize("width", [64, 768])
def test_models_that_name_less_of_their_shape_have_a_bound(width: int):
    assert 0 < bound(GPT2Config(n_embd=width, n_head=4)) <= MAX_TOKENS
