"""A low-rank adapter in place of the weights: trained, swapped and saved alone (arXiv 2106.09685).

The base becomes a constant of the module, in the compute dtype, whole on every rank: it has no
moments and no gradient, FSDP does not manage it, and it is no part of a policy's state. Engines
know nothing of adapters: what is published is the merged weights, W + alpha / rank x B A, under the
names of the plain model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.algorithm_config import LoraConfig

_A: Final = ".lora_A.default.weight"
_B: Final = ".lora_B.default.weight"
_BASE: Final = ".base_layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Weights below an adapter.

    Attributes:
        weights: By their names in the plain model, full, in the compute dtype.
        scale: Factor of the adapter's product.
    """

    weights: Mapping[str, torch.Tensor]
    scale: float

    @torch.no_grad()
    def merger(
        self, adapter: Mapping[str, nn.Parameter]
    ) -> Callable[[str, int, int], torch.Tensor]:
        """Returns what merges some rows of a weight with its adapter (collective).

        All of the adapter is gathered first, which is small, so that a rank which fails over its
        rows leaves nobody waiting.

        Args:
            adapter: Parameters of the adapter by name.
        """
        whole = {name: _whole(parameter) for name, parameter in adapter.items()}

        def rows_of(name: str, start: int, rows: int) -> torch.Tensor:
            part = slice(start, start + rows)
            weight, layer = self.weights[name][part], name.removesuffix(".weight")
            if layer + _A not in whole:
                return weight
            first, second = whole[layer + _A], whole[layer + _B][part]
            return torch.addmm(weight.to(first.dtype), second, first, alpha=self.scale)

        return rows_of


def add_adapter(
    lm: Any,  # noqa: ANN401 - untyped library
    config: LoraConfig,
    *,
    weights: Iterable[tuple[str, torch.Tensor]],
    compute_dtype: torch.dtype,
    device: torch.device,
) -> Base:
    """Puts an adapter with unset parameters into a model on "meta", and its weights below it.

    Args:
        lm: Model.
        config: Adapter.
        weights: Full first weights of the plain model, tied ones once.
        compute_dtype: Dtype of the base.
        device: Where the base lies.

    Raises:
        DomainError: NOT_BUILT without the library; MODEL_INVALID when no layer has a target's name.
    """
    _check_targets(lm, config)
    master_dtype = next(lm.parameters()).dtype
    try:
        import peft
    except ImportError as error:
        raise DomainError(
            ErrorReason.NOT_BUILT, "policies with lora need peft: pip install 'flexmarl[trainer]'"
        ) from error
    peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets), bias="none"
        ),
        lm,
        low_cpu_mem_usage=True,  # parameters stay on "meta" until they are given a place
    )
    for name, parameter in lm.named_parameters():
        if name.endswith((_A, _B)):  # the library makes them float32, whatever the model is
            parameter.data = parameter.data.to(master_dtype)
    by_name = {name: weight.to(device, compute_dtype) for name, weight in weights}
    _freeze(lm, by_name)
    return Base(weights=by_name, scale=config.alpha / config.rank)


def first_adapter(
    parameters: Iterable[tuple[str, torch.Size]], *, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the first adapter: A drawn from the seed as the library draws it, B zero.

    Args:
        parameters: (name, full shape).
        seed: Seed.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shape in parameters:
        full = torch.zeros(shape)
        if name.endswith(_A):
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
        yield name, full


def _check_targets(lm: Any, config: LoraConfig) -> None:  # noqa: ANN401 - untyped library
    # Scores read the head's weight themselves, so an adapter of it would never be trained.
    head = lm.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in lm.named_modules()
        if type(module) is nn.Linear and module is not head
    }
    unknown = sorted(set(config.targets) - linear)
    if unknown:
        raise DomainError(
            ErrorReason.MODEL_INVALID,
            f"lora.targets: {type(lm).__name__} has no linear layer {unknown[0]!r} below its "
            f"output head; it has: {', '.join(sorted(linear))}",
            {"target": unknown[0]},
        )


def _freeze(lm: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Turns all parameters but the adapter's into constants; tied ones become one tensor."""
    plain = {
        id(parameter): weights[name.replace(_BASE, "")]
        for name, parameter in lm.named_parameters()
        if not name.endswith((_A, _B))
    }
    for module in lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in plain:
                del module._parameters[name]
                module.register_buffer(name, plain[id(parameter)], persistent=False)


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    data = parameter.data
    return data.full_tensor() if isinstance(data, DTensor) else data
