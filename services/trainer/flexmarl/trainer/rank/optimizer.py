"""The one step of a batch: scale once, clip by the policy's own norm, step the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.algorithm_config import OptimizerConfig
from flexmarl.trainer.rank.shards import ShardedState
from flexmarl.trainer.state_layout import EXP_AVG, EXP_AVG_SQ


def global_norm(
    tensors: list[torch.Tensor], *, group: dist.ProcessGroup, device: torch.device
) -> float:
    """Returns the Euclidean norm over all ranks' shards (collective), summed in float64."""
    present = [tensor for tensor in tensors if tensor.numel()]
    norms = list(torch._foreach_norm(present, 2.0)) if present else []
    if norms and not bool(torch.isfinite(torch.stack(norms)).all()):
        # Squares of finite numbers may be beyond float32; a clip by an infinite norm would leave 0.
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in present]
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
    Both optimizers treat every element alone: a shard's step is that of the whole.

    Returns:
        Gradient norm before clipping, the factor of the clip, and the learning rate.

    Raises:
        DomainError: NON_FINITE on all ranks when the sum of finite gradients is not; NOT_BUILT
            when the optimizer's library is missing.
    """
    total = state.total
    assert total is not None, "a step needs a sum"
    torch._foreach_mul_(total, 1.0 / denominator)
    norm = global_norm(total, group=group, device=device)
    if not math.isfinite(norm):
        raise DomainError(
            ErrorReason.NON_FINITE,
            "the batch's gradient is beyond its dtype although those of its micro-batches are not: "
            "look at rewards, advantages and loss coefficients",
        )
    clip = min(1.0, config.max_grad_norm / norm) if norm > 0 else 1.0
    if clip < 1.0:
        torch._foreach_mul_(total, clip)
    rate = config.rate().at(num_updates)
    for decay, indexes in _groups(state, config):
        if config.kind == "adamw":
            _adamw(state, total, indexes, config, rate=rate, decay=decay, num_updates=num_updates)
        else:
            _lion(state, total, indexes, config, rate=rate, decay=decay)
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
        [state.moments[EXP_AVG][index] for index in indexes],
        [state.moments[EXP_AVG_SQ][index] for index in indexes],
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


def _lion(
    state: ShardedState,
    total: Sequence[torch.Tensor],
    indexes: Sequence[int],
    config: OptimizerConfig,
    *,
    rate: float,
    decay: float,
) -> None:
    try:
        from lion_pytorch import Lion
    except ImportError as error:
        raise DomainError(
            ErrorReason.NOT_BUILT,
            "optimizer.kind = \"lion\" needs lion-pytorch: pip install 'flexmarl[trainer]'",
        ) from error
    parameters = [nn.Parameter(state.shards[index].local) for index in indexes]
    optimizer = Lion(parameters, lr=rate, betas=config.betas, weight_decay=decay)
    for parameter, index in zip(parameters, indexes, strict=True):
        parameter.grad = total[index]
        optimizer.state[parameter]["exp_avg"] = state.moments[EXP_AVG][index]
    optimizer.step()
