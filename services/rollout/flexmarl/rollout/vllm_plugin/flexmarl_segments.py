"""Weight transfer engine for vLLM that reads a sealed segment by its path.

Runs in vLLM's worker processes: standard library, torch and vLLM only. Every rank of a tensor
parallel group maps the same file and takes its own part of it, as it does from a checkpoint.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass
class SegmentInit(WeightTransferInitInfo):
    """Nothing: a file needs no rendezvous."""


@dataclass
class SegmentUpdate(WeightTransferUpdateInfo):
    """Where the weights of a version lie.

    Attributes:
        path: Of the segment.
        names: Of the parameters, as Hugging Face names them.
        dtypes: In safetensors' spelling, one per parameter.
        shapes: One per parameter.
        offsets: First byte of each parameter.
    """

    path: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]


class SegmentEngine(WeightTransferEngine[SegmentInit, SegmentUpdate]):
    """See the module."""

    init_info_cls = SegmentInit
    update_info_cls = SegmentUpdate

    def init_transfer_engine(self, init_info: SegmentInit) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Let layers take checkpoint-shaped weights again: kernels may have packed them."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SegmentUpdate) -> None:
        """Load every parameter of the segment."""
        self.model.load_weights(_tensors(update_info))

    def finish_weight_update(self) -> None:
        """Let layers pack what they were given."""
        finalize_layerwise_reload(self.model, self.model_config)
        _pack_shared(self.model)

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:  # noqa: ANN401
        """Not the way here: trainers publish segments."""
        raise RuntimeError("weights are published as segments of the store")


class WorkerExtension:
    """Makes vLLM import this module in its workers; adds nothing to them."""


def _pack_shared(model: torch.nn.Module) -> None:
    """Pack weights anew that a layer has from another one, such as a head tied to the embeddings.

    On a CPU a layer multiplies with a copy of its weights that it packed once. vLLM packs anew what
    was loaded; a tied head is loaded under the other layer's name, and would go on with its old
    copy.
    """
    by_memory: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
            by_memory.setdefault(weight.data_ptr(), []).append(layer)
    for layers in by_memory.values():
        if len(layers) > 1:
            for layer in layers:
                layer.quant_method.process_weights_after_loading(layer)


def _tensors(update: SegmentUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    with open(update.path, "rb") as file:
        # Private and writable: torch warns about read-only memory, and nothing writes to it.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    parameters = zip(update.names, update.dtypes, update.shapes, update.offsets, strict=True)
    for name, dtype, shape, offset in parameters:
        flat = torch.frombuffer(memory, dtype=_DTYPES[dtype], count=math.prod(shape), offset=offset)
        yield name, flat.view(shape)


WeightTransferEngineFactory.register_engine("flexmarl", "flexmarl_segments", "SegmentEngine")
