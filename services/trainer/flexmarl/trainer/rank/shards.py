"""This rank's share of a policy's training state: weights, moments, gradient sum.

FSDP2 cuts every parameter along its first dimension into equal runs, so a rank's share is one
contiguous range of the full tensor. Segments hold full tensors and every rank copies its own range:
nothing is gathered, and state written by two ranks loads on one, and back, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flexmarl.api.meg_store.v1alpha1 import meg_store_pb2
from flexmarl.trainer.rank.segments import DTYPE_NAMES

EXP_AVG = "exp_avg."
EXP_AVG_SQ = "exp_avg_sq."


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One parameter: its name in the library's state dict and this rank's range of it.

    Attributes:
        name: Name.
        shape: Shape of the full tensor.
        parameter: The parameter that FSDP manages.
        local: This rank's rows of it, [length, ...].
        start: First row.
    """

    name: str
    shape: tuple[int, ...]
    parameter: nn.Parameter
    local: torch.Tensor
    start: int

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of a full tensor, as a view."""
        return full[self.start : self.start + self.local.shape[0]]


class ShardedState:
    """Weights, moments and gradient sum of the policy that is bound now.

    The sum is None while nothing is in it: the first gradient becomes the sum without a copy.

    Args:
        module: Sharded module whose parameters are named as in the state dict below `prefix`.
        rank: Rank in the module's group.
        world_size: Size of the group.
        prefix: Prefix of parameter names to take off.
    """

    def __init__(self, module: nn.Module, *, rank: int, world_size: int, prefix: str) -> None:
        self.shards = [
            _shard(name.removeprefix(prefix), parameter, rank=rank, world_size=world_size)
            for name, parameter in module.named_parameters()
        ]
        self.exp_avg = [torch.zeros_like(shard.local) for shard in self.shards]
        self.exp_avg_sq = [torch.zeros_like(shard.local) for shard in self.shards]
        self.total: list[torch.Tensor] | None = None
        self.leader = rank == 0

    def describe(self) -> list[meg_store_pb2.NamedBuffer]:
        """Full parameters in the master dtype, without offsets."""
        return [
            meg_store_pb2.NamedBuffer(
                name=shard.name,
                dtype=DTYPE_NAMES[shard.local.dtype],
                shape=shard.shape,
                size_bytes=shard.parameter.numel() * shard.local.element_size(),
            )
            for shard in self.shards
        ]

    def state_bytes(self) -> int:
        """Bytes of weights, moments and sum on this rank."""
        held = [shard.local for shard in self.shards]
        held += [*self.exp_avg, *self.exp_avg_sq, *(self.total or [])]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def set_initial(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes full weights; moments become zero.

        Raises:
            ValueError: A parameter is missing, unknown, or of another shape.
        """
        by_name = {shard.name: shard for shard in self.shards}
        for name, full in weights:
            shard = by_name.pop(name, None)
            if shard is None or tuple(full.shape) != shard.shape:
                raise ValueError(f"weights {name} {tuple(full.shape)} do not fit the model")
            shard.local.copy_(shard.cut(full))
        if by_name:
            raise ValueError(f"weights lack {min(by_name)}")
        for moment in (*self.exp_avg, *self.exp_avg_sq):
            moment.zero_()

    def load(self, kind: str, buffers: Mapping[str, torch.Tensor]) -> None:
        """Copies this rank's ranges out of a segment of full tensors.

        Raises:
            KeyError: A buffer is missing.
            ValueError: A buffer has another shape.
        """
        if kind == "gradients":
            self.total = [torch.empty_like(shard.local) for shard in self.shards]
        for shard, name, local in self._pieces(kind):
            full = buffers[name]
            if tuple(full.shape) != shard.shape:
                raise ValueError(f"buffer {name} {tuple(full.shape)} does not fit the model")
            local.copy_(shard.cut(full))

    def export(self, kind: str, buffers: Mapping[str, torch.Tensor]) -> None:
        """Copies this rank's ranges into a segment of full tensors, converting the dtype."""
        for shard, name, local in self._pieces(kind):
            shard.cut(buffers[name]).copy_(local)

    def gradients(self) -> list[torch.Tensor]:
        """Takes this rank's gradients off the parameters; unused parameters give zeros."""
        taken = []
        for shard in self.shards:
            gradient = shard.parameter.grad
            shard.parameter.grad = None
            if gradient is None:
                taken.append(torch.zeros_like(shard.local))
            else:
                taken.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        return taken

    def drop_gradients(self) -> None:
        """Frees gradients that are on the parameters."""
        for shard in self.shards:
            shard.parameter.grad = None

    def add(self, gradients: list[torch.Tensor]) -> None:
        """Adds a whole micro-batch's gradient to the sum."""
        if self.total is None:
            self.total = gradients
        else:
            torch._foreach_add_(self.total, gradients)

    def _pieces(self, kind: str) -> Iterator[tuple[Shard, str, torch.Tensor]]:
        for index, shard in enumerate(self.shards):
            match kind:
                case "master" | "weights":
                    yield shard, shard.name, shard.local
                case "moments":
                    yield shard, EXP_AVG + shard.name, self.exp_avg[index]
                    yield shard, EXP_AVG_SQ + shard.name, self.exp_avg_sq[index]
                case "gradients":
                    assert self.total is not None, "an empty sum has nothing to copy"
                    yield shard, shard.name, self.total[index]
                case _:
                    raise ValueError(f"unknown kind of state {kind!r}")


def _shard(name: str, parameter: nn.Parameter, *, rank: int, world_size: int) -> Shard:
    shape = tuple(parameter.shape)
    local = parameter.data
    if isinstance(local, DTensor):
        local = local.to_local()
    run = -(-shape[0] // world_size)  # torch.chunk: equal runs, the last ones shorter or empty
    return Shard(
        name=name,
        shape=shape,
        parameter=parameter,
        local=local,
        start=min(rank * run, shape[0]),
    )
