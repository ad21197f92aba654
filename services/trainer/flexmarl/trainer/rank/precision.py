"""float64 all the way, for exact comparisons: some layers of the library drop to float32."""

from __future__ import annotations

import types

import torch
from torch import nn


def keep_float64(model: nn.Module) -> None:
    """Replaces the forward of Llama-like RMS norms, which cast to float32 inside.

    A float32 step in the middle would turn differences of 1e-16 between two splits of the same
    rows into 1e-7.
    """
    for module in model.modules():
        if hasattr(module, "variance_epsilon") and type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_rms_norm, module)


def _rms_norm(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    epsilon = float(getattr(self, "variance_epsilon"))  # noqa: B009 - untyped attribute
    weight: torch.Tensor = getattr(self, "weight")  # noqa: B009 - a parameter, or a constant
    return weight * (hidden_states * torch.rsqrt(variance + epsilon))
