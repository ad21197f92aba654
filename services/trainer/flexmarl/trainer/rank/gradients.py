"""The gradient of one micro-batch: formed apart, checked on all ranks, added whole or dropped."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from flexmarl.core.passes import plan_passes
from flexmarl.runtime.run_config import PolicyConfig
from flexmarl.trainer.rank.losses.base import LossInputs, LossOutput
from flexmarl.trainer.rank.losses.registry import LOSSES
from flexmarl.trainer.rank.model import ScoringModel
from flexmarl.trainer.rank.packing import PassColumns, Rows, make_pass
from flexmarl.trainer.rank.shards import ShardedState


@dataclass(slots=True, kw_only=True)
class MicroBatchStats:
    """What a micro-batch did on this rank; see RankAdded."""

    finite: bool = True
    num_tokens: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def add_micro_batch(
    rows: Rows,
    *,
    model: ScoringModel,
    state: ShardedState,
    config: PolicyConfig,
    num_updates: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> MicroBatchStats:
    """Adds the micro-batch's unnormalised gradient to the sum, unless it is not finite.

    All ranks call this with the same rows. FSDP means gradients over ranks, so the loss is
    multiplied by the world size: the sum is the same for every number of ranks.
    """
    world_size, rank = group.size(), group.rank()
    plan = plan_passes(
        rows.lengths, world_size=world_size, max_tokens=config.trainer.max_tokens_per_pass
    )
    coefficient = config.loss.entropy_at(num_updates)
    stats = MicroBatchStats()
    outputs: list[LossOutput] = []
    try:
        for chosen in plan[rank]:
            columns = make_pass(rows, chosen, device=device)
            started = time.perf_counter()
            output = _forward(model, columns, config, coefficient)
            stats.seconds["forward"] += (now := time.perf_counter()) - started
            torch.autograd.backward(output.total * world_size)
            stats.seconds["backward"] += time.perf_counter() - now
            stats.num_tokens += int(columns.mask.sum())
            outputs.append(
                LossOutput(total=output.total.detach(), sums=output.sums, maxima=output.maxima)
            )
        started = time.perf_counter()
        gradients = state.gradients()
    except BaseException:
        state.drop_gradients()
        raise
    stats.finite = all_finite(gradients, group=group, device=device)
    if stats.finite:
        state.add(gradients)
    stats.seconds["add"] += time.perf_counter() - started
    _summarise(outputs, stats)
    return stats


def _forward(
    model: ScoringModel, columns: PassColumns, config: PolicyConfig, coefficient: float
) -> LossOutput:
    current, entropy = model(columns.inputs, entropy=coefficient != 0.0)
    inputs = LossInputs(
        current=current,
        entropy=entropy,
        behaviour=columns.behaviour,
        advantage=columns.advantage,
        row_tokens=columns.row_tokens,
        mask=columns.mask,
    )
    return LOSSES[config.loss.kind](inputs, config.loss, coefficient)


def all_finite(
    tensors: list[torch.Tensor], *, group: dist.ProcessGroup, device: torch.device
) -> bool:
    """Says whether every element is finite on every rank (collective).

    The largest magnitude decides: it is NaN or infinite as soon as one element is, while a norm
    could overflow on finite elements.
    """
    present = [tensor for tensor in tensors if tensor.numel()]
    peaks = torch._foreach_norm(present, float("inf")) if present else []
    flag = torch.ones(1, device=device)
    if peaks and not bool(torch.isfinite(torch.stack(list(peaks))).all()):
        flag.zero_()
    if group.size() > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def _summarise(outputs: list[LossOutput], stats: MicroBatchStats) -> None:
    if not stats.num_tokens:
        return
    for output in outputs:
        for name, value in output.sums.items():
            stats.sums[name] += float(value)
        for name, value in output.maxima.items():
            stats.maxima[name] = max(stats.maxima.get(name, 0.0), float(value))
