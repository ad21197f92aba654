"""How many tokens a policy's passes have on this device."""

from __future__ import annotations

from typing import Any

import torch

from flexmarl.core.activations import MAX_TOKENS, LayerSizes, tokens_that_fit
from flexmarl.runtime.policy_config import PolicyTrainerConfig
from flexmarl.trainer.rank.model import ScoringModel


def max_tokens_of(model: ScoringModel, config: PolicyTrainerConfig, *, device: torch.device) -> int:
    """Returns the bound of the policy's config, or the one that its model has on this device.

    A GPU says when a pass does not fit, and smaller ones are made then; a CPU does not.
    """
    if config.max_tokens_per_pass is not None:
        return config.max_tokens_per_pass
    if device.type != "cpu":
        return MAX_TOKENS
    return tokens_that_fit(
        _sizes(model.lm.config.get_text_config()),
        element_bytes=getattr(torch, config.compute_dtype).itemsize,
        checkpointing=config.gradient_checkpointing,
    )


def _sizes(config: Any) -> LayerSizes:  # noqa: ANN401 - untyped library
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    return LayerSizes(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        query=heads * head,
        key=keys * head,
        inner=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
    )
