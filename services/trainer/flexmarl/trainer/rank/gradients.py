"""The gradient of one micro-batch: formed apart, checked on all ranks, added whole or dropped."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from flexmarl.core.passes import Tile, plan_passes
from flexmarl.runtime.algorithm_config import LossConfig
from flexmarl.trainer.rank.losses.base import PolicyLoss
from flexmarl.trainer.rank.losses.total import Coefficients, LossOutput, total_loss
from flexmarl.trainer.rank.model import ScoringModel
from flexmarl.trainer.rank.packing import PassColumns, Rows, make_pass
from flexmarl.trainer.rank.reference import Reference
from flexmarl.trainer.rank.shards import ShardedState


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """What forms gradients of the bound policy.

    Attributes:
        loss: How it learns.
        model: Its model.
        state: Its state.
        policy_loss: Its policy loss.
        max_tokens: Most tokens of a pass.
        reference: First weights, for the divergence; None without one.
        group: Process group.
        device: Device.
    """

    loss: LossConfig
    model: ScoringModel
    state: ShardedState
    policy_loss: PolicyLoss
    max_tokens: int
    reference: Reference | None
    group: dist.ProcessGroup
    device: torch.device


@dataclass(slots=True, kw_only=True)
class MicroBatchStats:
    """What a micro-batch did on this rank; see RankAdded."""

    finite: bool = True
    num_tokens: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def add_micro_batch(rows: Rows, learner: Learner, *, num_updates: int) -> MicroBatchStats:
    """Adds the micro-batch's unnormalised gradient to the sum, unless it is not finite.

    All ranks call this with the same rows. FSDP means gradients over ranks, so the loss is
    multiplied by the world size: the sum is the same for every number of ranks.
    """
    stats = MicroBatchStats()
    passes = _passes(rows, learner)
    outputs: list[LossOutput] = []
    try:
        references = _reference_scores(passes, learner, stats)
        learner.state.begin_gradients()
        for columns, reference in zip(passes, references, strict=True):
            outputs += _pass(columns, reference, learner, num_updates, stats)
        started = time.perf_counter()
        gradients = learner.state.gradients()
    except BaseException:
        learner.state.drop_gradients()
        raise
    stats.finite = all_finite(gradients, group=learner.group, device=learner.device)
    if stats.finite:
        learner.state.add(gradients)
    stats.seconds["add"] += time.perf_counter() - started
    _summarise(outputs, stats)
    stats.maxima["attention_padding"] = _attention_padding(passes)
    return stats


def _passes(rows: Rows, learner: Learner) -> list[PassColumns]:
    plan = plan_passes(
        rows.lengths,
        world_size=learner.group.size(),
        max_tokens=learner.max_tokens,
    )
    return [make_pass(rows, chosen, device=learner.device) for chosen in plan[learner.group.rank()]]


def _reference_scores(
    passes: Sequence[PassColumns], learner: Learner, stats: MicroBatchStats
) -> list[torch.Tensor | None]:
    """Log-probabilities under the reference: all passes in one go, so that it moves in once."""
    if learner.reference is None:
        return [None] * len(passes)
    started = time.perf_counter()
    with learner.reference.in_place_of(learner.state, learner.model):
        scores: list[torch.Tensor | None] = [
            learner.model.score(columns.inputs)[0] for columns in passes
        ]
    stats.seconds["reference"] += time.perf_counter() - started
    return scores


def _pass(
    columns: PassColumns,
    reference: torch.Tensor | None,
    learner: Learner,
    num_updates: int,
    stats: MicroBatchStats,
) -> list[LossOutput]:
    """Adds a pass's gradient to the parameters; returns what the loss made of its tiles."""
    config, world_size = learner.loss, learner.group.size()
    coefficients = Coefficients(
        entropy=config.entropy_at(num_updates),
        kl=0.0 if config.kl is None else config.kl.at(num_updates),
    )
    outputs: list[LossOutput] = []

    def loss(tile: Tile, current: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        inputs = columns.loss_inputs(tile, current=current, entropy=entropy, reference=reference)
        output = total_loss(inputs, config, coefficients, learner.policy_loss)
        outputs.append(replace(output, total=output.total.detach()))
        return output.total * world_size

    started = time.perf_counter()
    total = learner.model.loss(
        columns.inputs, loss, row_ends=columns.row_ends, entropy=coefficients.entropy != 0.0
    )
    stats.seconds["forward"] += (now := time.perf_counter()) - started
    torch.autograd.backward(total)
    stats.seconds["backward"] += time.perf_counter() - now
    stats.num_tokens += int(columns.mask.sum())
    return outputs


def all_finite(values: torch.Tensor, *, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Says whether every element is finite on every rank (collective).

    The extremes decide: they are NaN or infinite as soon as one element is, while a norm could
    overflow on finite elements, and takes ten times as long.
    """
    flag = torch.ones(1, device=device)
    if values.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(values))).all()):
        flag.zero_()
    if group.size() > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def _attention_padding(passes: Sequence[PassColumns]) -> float:
    """Share of the places that attention computes for no token; nothing else computes any."""
    places = sum(columns.inputs.rows.count * columns.inputs.rows.width for columns in passes)
    return 1.0 - sum(columns.num_tokens for columns in passes) / places


def _summarise(outputs: list[LossOutput], stats: MicroBatchStats) -> None:
    if not stats.num_tokens:
        return
    for output in outputs:
        for name, value in output.sums.items():
            stats.sums[name] += float(value)
        for name, value in output.maxima.items():
            stats.maxima[name] = max(stats.maxima.get(name, 0.0), float(value))
