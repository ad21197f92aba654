"""The last layer goes on after its attention with scored tokens only.

Whatever a model computes for a token there beyond its key and value is read by nobody but the
output head, and that reads scored tokens alone: of a long prompt with a short answer, a few. The
rest of a layer is most of it, so a model of few layers saves a large part of its time by this.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

_ATTENTION_THEN_MLP: Final = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
)
"""Layers of the library that are h + attention(norm h), then h + mlp(norm h), and nothing else."""


def cut_last_layer(layers: Any) -> bool:  # noqa: ANN401 - untyped library
    """Has the last layer return scored tokens only, where it is known what it computes.

    Args:
        layers: The model's layers, before they are sharded. The model is to be called with the
            scored tokens as `scored`.

    Returns:
        Whether it does.
    """
    layer = layers[-1]
    if type(layer).__name__ not in _ATTENTION_THEN_MLP:
        return False
    layer.forward = partial(_forward, layer)
    return True


def _forward(
    layer: Any,  # noqa: ANN401 - untyped library
    hidden_states: torch.Tensor,
    *,
    scored: torch.Tensor,
    **attention: Any,  # noqa: ANN401 - the library's
) -> torch.Tensor:
    """[1, tokens, width] to [1, scored, width]."""
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **attention)
    hidden = hidden_states[:, scored] + attended[:, scored]
    result: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return result
