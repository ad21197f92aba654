"""A Hugging Face causal LM, sharded by FSDP2, that scores sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.algorithm_config import LoraConfig
from flexmarl.trainer.rank.attention import PackedRows
from flexmarl.trainer.rank.construct import build_empty
from flexmarl.trainer.rank.last_layer import cut_last_layer
from flexmarl.trainer.rank.lora import Base, add_adapter
from flexmarl.trainer.rank.precision import keep_float64
from flexmarl.trainer.rank.scoring import Scored, TileLoss, score, scored_loss

T = TypeVar("T")

ONE_UNIT_BELOW: Final = 1 << 22
"""Models with fewer parameters are sharded as one unit, not layer by layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInputs:
    """Rows of one pass, one after the other without padding.

    Attributes:
        tokens: Prompts and responses, int64 [1, tokens].
        positions: Place of each token in its row, int64 [1, tokens].
        rows: How the rows lie.
        scored: Tokens whose hidden state predicts a sampled one, int64 [scored].
        targets: The sampled tokens, int64 [scored].
        temperatures: Sampling temperature of each one's row [scored].
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: PackedRows
    scored: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor


class ScoringModel(nn.Module):
    """Log-probabilities and entropies of sampled tokens at the sampling temperature.

    Prompt positions never go through the output head.

    Args:
        lm: Model with an output head, built with the packed attention.
        score_dtype: Dtype of logits and log-probabilities: float32, or float64.
        base: Weights below an adapter; None without one.
    """

    def __init__(
        self,
        lm: Any,  # noqa: ANN401 - untyped library
        score_dtype: torch.dtype,
        base: Base | None = None,
    ) -> None:
        super().__init__()
        self.lm = lm
        self.score_dtype = score_dtype
        self.base = base
        self._scored_only = cut_last_layer(_layers(lm))

    def score(self, inputs: PassInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (log-probabilities, entropies) [scored], without a gradient."""
        with torch.no_grad():
            scores: tuple[torch.Tensor, torch.Tensor] = self(inputs, score)
        return scores

    def loss(
        self, inputs: PassInputs, loss: TileLoss, *, row_ends: Sequence[int], entropy: bool
    ) -> torch.Tensor:
        """Returns the sum of a loss over the pass; see `scored_loss`."""
        read = partial(scored_loss, loss=loss, row_ends=row_ends, entropy=entropy)
        total: torch.Tensor = self(inputs, read)
        return total

    def forward(self, inputs: PassInputs, read: Callable[[Scored], T]) -> T:
        """Returns what `read` makes of the scored tokens at the output head."""
        hidden = self.lm.base_model(
            input_ids=inputs.tokens,
            position_ids=inputs.positions,
            use_cache=False,
            packed_rows=inputs.rows,
            **({"scored": inputs.scored} if self._scored_only else {}),
        ).last_hidden_state[0]
        head = self.lm.get_output_embeddings()
        return read(
            Scored(
                hidden=hidden if self._scored_only else hidden[inputs.scored],
                weight=head.weight,
                bias=head.bias,
                targets=inputs.targets,
                temperatures=inputs.temperatures,
                dtype=self.score_dtype,
            )
        )

    def forget_gathered(self) -> None:
        """Frees weights gathered over ranks, so that the next pass gathers them anew."""
        if isinstance(self, FSDPModule):
            self.reshard()


def master_dtype(compute_dtype: str) -> torch.dtype:
    """Returns the dtype of master weights, gradient sums and moments."""
    return torch.float64 if compute_dtype == "float64" else torch.float32


def build_sharded(
    model_path: Path,
    *,
    compute_dtype: str,
    checkpointing: bool,
    mesh: DeviceMesh,
    device: torch.device,
    lora: LoraConfig | None = None,
    weights: Iterable[tuple[str, torch.Tensor]] = (),
) -> ScoringModel:
    """Builds the model of a folder with unset weights, sharded over `mesh`.

    Args:
        model_path: Folder.
        compute_dtype: Dtype of forward and backward.
        checkpointing: Compute layers again in the backward.
        mesh: Ranks.
        device: Device.
        lora: Adapter that is trained in place of the weights.
        weights: The weights below it, full.

    Raises:
        DomainError: MODEL_INVALID; NOT_BUILT for an adapter whose library is missing.
    """
    dtype = master_dtype(compute_dtype)
    lm = build_empty(model_path, dtype=dtype, device=device)
    if dtype == torch.float64:
        keep_float64(lm)
    base = None
    if lora is not None:
        low = torch.bfloat16 if compute_dtype == "bfloat16" else dtype
        base = add_adapter(lm, lora, weights=weights, compute_dtype=low, device=device)
    return shard(lm, compute_dtype=compute_dtype, checkpointing=checkpointing, mesh=mesh, base=base)


def shard(
    lm: Any,  # noqa: ANN401 - untyped library
    *,
    compute_dtype: str,
    checkpointing: bool,
    mesh: DeviceMesh,
    base: Base | None = None,
) -> ScoringModel:
    """Shards a model in the master dtype: each layer a unit, and the rest another.

    Raises:
        DomainError: MODEL_INVALID.
    """
    dtype = master_dtype(compute_dtype)
    model = ScoringModel(lm, score_dtype=dtype, base=base)
    if checkpointing:
        for layer in _layers(lm):
            # Inside of what FSDP wraps, which has the weights whole when they are needed again.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    # The library's dropout and the like stay off: log-probabilities must be those of the engine.
    model.eval()
    small = sum(parameter.numel() for parameter in model.parameters()) < ONE_UNIT_BELOW
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if compute_dtype == "bfloat16" else None,
        reduce_dtype=dtype if compute_dtype == "bfloat16" else None,
        cast_forward_inputs=False,  # temperatures must stay exact
    )
    # Hooks cost more than the overlap of layers brings when the whole model is small.
    for layer in () if small else _layers(lm):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def _layers(lm: Any) -> nn.ModuleList:  # noqa: ANN401 - untyped library
    lists = [child for child in lm.base_model.children() if isinstance(child, nn.ModuleList)]
    if not any(lists):
        raise DomainError(
            ErrorReason.MODEL_INVALID,
            f"{type(lm).__name__} has no layers to shard",
            {"model": type(lm).__name__},
        )
    return max(lists, key=len)
