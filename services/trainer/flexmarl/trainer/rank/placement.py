"""Puts the shards of an FSDP module into memory of ours.

FSDP allocates its shards itself and offers no way to say where. This sets what it reads: the flat
padded data that it gathers, and the parameter over it. Shards may lie side by side without room for
padding: FSDP gathers what lies behind a shorter shard as padding, never looks at it, never writes
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter's shard goes.

    Attributes:
        padded: Flat, as many elements as the largest rank's shard has.
        rows: Rows that this rank has.
    """

    padded: torch.Tensor
    rows: int


def place(model: nn.Module, places: Mapping[str, Place]) -> dict[str, nn.Parameter]:
    """Moves every parameter to its place; what it holds is what lies there.

    Args:
        model: Module sharded by `fully_shard`, not in the middle of a pass.
        places: By name of the parameter.

    Returns:
        The new parameters by name.
    """
    managed = {id(item.sharded_param): item for item in _managed(model)}
    placed = {}
    for name, parameter in list(model.named_parameters()):
        item, there = managed[id(parameter)], places[name]
        local = there.padded.view(item.padded_sharded_param_size).narrow(0, 0, there.rows)
        item._sharded_param_data = there.padded
        item.sharded_param = placed[name] = nn.Parameter(
            item.to_sharded_dtensor(local), requires_grad=parameter.requires_grad
        )
        item._setattr_on_modules(item.sharded_param)  # tied ones, too
    return placed


def _managed(model: nn.Module) -> list[Any]:
    return [
        item
        for unit in model.modules()
        if isinstance(unit, FSDPModule)
        for group in unit._get_fsdp_state()._fsdp_param_groups
        for item in group.fsdp_params
    ]
