"""The one step of a batch: scale once, clip by the policy's own norm, AdamW."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from flexmarl.runtime.algorithm_config import OptimizerConfig
from flexmarl.trainer.rank.shards import ShardedState


def global_norm(
    tensors: list[torch.Tensor], *, group: dist.ProcessGroup, device: torch.device
) -> float:
    """Returns the Euclidean norm over all ranks' shards (collective), summed in float64."""
    present = [tensor for tensor in tensors if tensor.numel()]
    norms = torch._foreach_norm(present, 2.0) if present else []
    squared = torch.zeros(1, dtype=torch.float64, device=device)
    if norms:
        squared += torch.stack([norm.double() for norm in norms]).square().sum()
    if group.size() > 1:
        dist.all_reduce(squared, group=group)
    return float(squared.sqrt().item())


def step(
    state: ShardedState,
    *,
    config: OptimizerConfig,
    denominator: float,
    num_updates: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, float]:
    """Turns the sum into one step and empties it.

    The step's number is the policy's own count of updates, so moments need no counter of their own.
    It treats every element alone: a shard's step is that of the whole.

    Returns:
        Gradient norm before clipping, the factor of the clip, and the learning rate.
    """
    total = state.total
    assert total is not None, "a step needs a sum"
    torch._foreach_mul_(total, 1.0 / denominator)
    norm = global_norm(total, group=group, device=device)
    clip = min(1.0, config.max_grad_norm / norm) if norm > 0 else 1.0
    if clip < 1.0:
        torch._foreach_mul_(total, clip)
    rate = config.rate().at(num_updates)
    for decay, indexes in _groups(state, config):
        _adamw(state, total, indexes, config, rate=rate, decay=decay, num_updates=num_updates)
    state.total = None
    return {"grad_norm": norm, "clip_factor": clip, "lr": rate}


def _groups(state: ShardedState, config: OptimizerConfig) -> list[tuple[float, list[int]]]:
    """Parameters that this rank has something of, by what they decay."""
    groups: dict[float, list[int]] = {}
    for index, shard in enumerate(state.shards):
        if shard.local.numel():
            decays = config.decay == "all" or len(shard.shape) > 1
            groups.setdefault(config.weight_decay if decays else 0.0, []).append(index)
    return list(groups.items())


def _adamw(
    state: ShardedState,
    total: Sequence[torch.Tensor],
    indexes: Sequence[int],
    config: OptimizerConfig,
    *,
    rate: float,
    decay: float,
    num_updates: int,
) -> None:
    device = state.shards[indexes[0]].local.device
    adamw(
        [state.shards[index].local for index in indexes],
        [total[index] for index in indexes],
        [state.exp_avg[index] for index in indexes],
        [state.exp_avg_sq[index] for index in indexes],
        [],
        [torch.tensor(float(num_updates), device=device) for _ in indexes],
        fused=True,  # one pass without temporaries the size of the model
        amsgrad=False,
        beta1=config.betas[0],
        beta2=config.betas[1],
        lr=rate,
        weight_decay=decay,
        eps=config.eps,
        maximize=False,
    )
