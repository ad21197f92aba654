"""This rank's share of a policy's training state: weights, moments, gradient sum.

All of it lies in one region of the worker's memory, one block per value that a parameter has:

    [ weights | first moment | second moment, if the optimizer has one | gradient sum ]

A block is laid out as the rank's part of a segment (`flexmarl.trainer.state_layout`), so each kind
of state moves in one copy, and state that another number of ranks wrote loads bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flexmarl.api.meg_store.v1 import meg_store_pb2
from flexmarl.trainer.rank.lora import Base
from flexmarl.trainer.rank.placement import Place, place
from flexmarl.trainer.rank.segments import DTYPE_NAMES, DTYPES
from flexmarl.trainer.state_layout import Block, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One parameter: the piece of it that this rank has, in place.

    Attributes:
        piece: Name, full shape, rows.
        parameter: The parameter that FSDP manages.
        local: This rank's rows of it, [rows, ...].
    """

    piece: Piece
    parameter: nn.Parameter
    local: torch.Tensor

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.piece.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return self.piece.shape

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of a full tensor, as a view."""
        return full[self.piece.start : self.piece.start + self.piece.rows]


def describe(module: nn.Module, *, prefix: str) -> list[meg_store_pb2.NamedBuffer]:
    """Returns a sharded module's parameters as full tensors, without offsets, tied ones once."""
    return [
        meg_store_pb2.NamedBuffer(
            name=name.removeprefix(prefix),
            dtype=DTYPE_NAMES[parameter.dtype],
            shape=parameter.shape,
            size_bytes=parameter.numel() * parameter.element_size(),
        )
        for name, parameter in module.named_parameters()
    ]


def describe_base(
    base: Base, trained: Sequence[meg_store_pb2.NamedBuffer]
) -> list[meg_store_pb2.NamedBuffer]:
    """Returns the plain model's weights as full tensors in the dtype of what is trained."""
    dtype = trained[0].dtype
    return [
        meg_store_pb2.NamedBuffer(
            name=name,
            dtype=dtype,
            shape=weight.shape,
            size_bytes=weight.numel() * DTYPES[dtype].itemsize,
        )
        for name, weight in base.weights.items()
    ]


def state_bytes(block: Block) -> int:
    """Returns the size of the region that a rank's state needs."""
    return block.padded_bytes + (len(block.moments) + 1) * block.size_bytes


class ShardedState:
    """Weights, moments and gradient sum of the policy that is bound now.

    The sum is None while nothing is in it.

    Args:
        module: Sharded module whose parameters are named as in the state dict below `prefix`; its
            parameters are moved into the region.
        block: What this rank has of them.
        memory: The region, `state_bytes` long.
        prefix: Prefix of parameter names to take off.
        base: Weights below an adapter and this rank's share of them; None without one.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        block: Block,
        memory: torch.Tensor,
        prefix: str,
        base: tuple[Base, Block] | None = None,
    ) -> None:
        self._memory = memory
        self._base = base
        self._block = block
        parameters = place(
            module,
            {
                prefix + piece.name: Place(
                    _view(memory, piece.offset, piece, piece.padded_rows).view(-1), piece.rows
                )
                for piece in block.pieces
            },
        )
        locals_ = self._views("master", 0)
        self.shards = [
            Shard(piece=piece, parameter=parameters[prefix + piece.name], local=local)
            for piece, local in zip(block.pieces, locals_, strict=True)
        ]
        self.moments = {
            prefix: self._views("moments", number) for number, prefix in enumerate(block.moments)
        }
        self.total: list[torch.Tensor] | None = None
        self._fresh: torch.Tensor | None = None
        (self._dtype,) = {DTYPES[piece.dtype] for piece in block.pieces}

    def size_bytes(self) -> int:
        """Bytes of weights, moments and sum on this rank."""
        return state_bytes(self._block)

    def flat(self, kind: str) -> torch.Tensor:
        """Returns one kind of state as the bytes that a segment holds of it."""
        start, count = self._span(kind)
        return self._memory[start : start + count * self._block.size_bytes]

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
        self.flat("moments").zero_()

    def set_sum(self) -> None:
        """Says that the memory of the sum holds one."""
        self.total = self._views("gradients", 0)

    def full_rows(
        self, buffers: Mapping[str, meg_store_pb2.NamedBuffer]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields this rank's rows of the weights, converted, with their places in a segment.

        With an adapter it is collective at its start, and the weights are merged with it.

        Args:
            buffers: Full tensors by name, of any dtype.
        """
        for piece, local in self._published():
            buffer = buffers[piece.name]
            dtype = DTYPES[buffer.dtype]
            row_bytes = prod(piece.shape[1:]) * dtype.itemsize
            rows = local.to(dtype).contiguous().view(-1).view(torch.uint8)
            if rows.numel():
                yield buffer.offset + piece.start * row_bytes, rows

    def _published(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        if self._base is None:
            yield from ((shard.piece, shard.local) for shard in self.shards)
            return
        base, block = self._base
        merge = base.merger({shard.name: shard.parameter for shard in self.shards})
        for piece in block.pieces:
            yield piece, merge(piece.name, piece.start, piece.rows)

    def begin_gradients(self) -> None:
        """Gives the parameters gradients of zero, in one piece of memory, for passes to add to.

        Gradients that the backward makes one by one come to lie between activations, and keep the
        memory of those from being given back. This piece is kept for the next micro-batch.
        """
        if self._fresh is None:
            size_bytes, device = self._block.size_bytes, self._memory.device
            self._fresh = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        else:
            self._fresh.zero_()
        for shard in self.shards:
            parameter = shard.parameter
            assert isinstance(parameter, DTensor), "it is sharded"
            local = _view(self._fresh, shard.piece.offset, shard.piece, shard.piece.rows)
            # `DTensor.from_local` is an operation of autograd, at a tenth of a millisecond each.
            parameter.grad = DTensor(  # type: ignore[no-untyped-call]
                local, parameter._spec, requires_grad=False
            )

    def gradients(self) -> torch.Tensor:
        """Takes this rank's gradients off the parameters; all of them, flat.

        They are there until the next micro-batch begins.
        """
        assert self._fresh is not None, "a micro-batch begins with gradients of zero"
        self._detach()
        return self._fresh.view(self._dtype)

    def drop_gradients(self) -> None:
        """Frees gradients that are on the parameters, and the memory for more."""
        self._detach()
        self._fresh = None

    def add(self, gradients: torch.Tensor) -> None:
        """Adds a whole micro-batch's gradient, flat, to the sum."""
        total = self.flat("gradients").view(self._dtype)
        if self.total is not None:
            total.add_(gradients)
            return
        total.copy_(gradients)
        self.set_sum()

    def _detach(self) -> None:
        for shard in self.shards:
            shard.parameter.grad = None

    def _span(self, kind: str) -> tuple[int, int]:
        """First byte of a kind of state, and how many blocks it has."""
        padded, size = self._block.padded_bytes, self._block.size_bytes
        match kind:
            case "master":
                return 0, 1
            case "moments":
                return padded, len(self._block.moments)
            case "gradients":
                return padded + len(self._block.moments) * size, 1
            case _:
                raise ValueError(f"unknown kind of state {kind!r}")

    def _views(self, kind: str, number: int) -> list[torch.Tensor]:
        start = self._span(kind)[0] + number * self._block.size_bytes
        return [
            _view(self._memory, start + piece.offset, piece, piece.rows)
            for piece in self._block.pieces
        ]


def _view(memory: torch.Tensor, offset: int, piece: Piece, rows: int) -> torch.Tensor:
    flat = memory[offset : offset + rows * piece.row_bytes].view(DTYPES[piece.dtype])
    return flat.view(rows, *piece.shape[1:])
