"""Taking weights over from a sealed segment, all or nothing.

Everything is checked before the first parameter is touched: that the mapped bytes have the named
content, and that names, shapes and types are the model's. So a refusal leaves the old weights
whole (I11).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexmarl.api.rollout.v1.engine_pb2 import EngineBuffer, EngineLoad
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.engines.segment import map_checked

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def take_over(model: Any, load: EngineLoad) -> None:  # noqa: ANN401 - transformers is untyped
    """Copy the segment's buffers into the model.

    Raises:
        DomainError: CHECKSUM_MISMATCH, WEIGHTS_MISMATCH, SEGMENT_NOT_FOUND; the model is unchanged.
    """
    memory = map_checked(load)
    pairs = _matched(model, memory, load.buffers)
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def _matched(
    model: Any,  # noqa: ANN401 - transformers is untyped
    memory: mmap.mmap,
    buffers: Sequence[EngineBuffer],
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of (parameter, its bytes); each tensor of the model occurs, tied ones once."""
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    persistent = set(model.state_dict())
    named.update((name, value) for name, value in model.named_buffers() if name in persistent)
    sources: dict[int, Tensor] = {}
    pairs: list[tuple[Tensor, Tensor]] = []
    for buffer in buffers:
        target = named.get(buffer.name)
        if target is None:
            raise _mismatch(f"the model has no parameter {buffer.name!r}")
        source = _view(memory, buffer, target)
        earlier = sources.get(id(target))
        if earlier is None:
            sources[id(target)] = source
            pairs.append((target, source))
        elif not torch.equal(earlier, source):
            raise _mismatch(f"{buffer.name!r} is tied to another parameter but differs from it")
    missing = sorted(name for name, value in named.items() if id(value) not in sources)
    if missing:
        raise _mismatch(f"no weights for {len(missing)} parameters, such as {missing[0]!r}")
    return pairs


def _view(memory: mmap.mmap, buffer: EngineBuffer, target: Tensor) -> Tensor:
    dtype, shape = _TORCH_DTYPES.get(buffer.dtype), tuple(buffer.shape)
    if dtype != target.dtype or shape != tuple(target.shape):
        raise _mismatch(
            f"{buffer.name!r} is {buffer.dtype}{list(shape)}, the model wants "
            f"{str(target.dtype).removeprefix('torch.')}{list(target.shape)}"
        )
    if buffer.size_bytes != target.numel() * target.element_size():
        raise _mismatch(f"{buffer.name!r} has {buffer.size_bytes} bytes")
    flat = torch.frombuffer(memory, dtype=target.dtype, count=target.numel(), offset=buffer.offset)
    return flat.view(target.shape)


def _mismatch(message: str) -> DomainError:
    return DomainError(ErrorReason.WEIGHTS_MISMATCH, message)
