"""A Hugging Face causal LM, sharded by FSDP2, that scores sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.trainer.rank.construct import build_empty
from flexmarl.trainer.rank.precision import keep_float64

LOGITS_PER_CHUNK: Final = 1 << 24
"""Most logits alive at once in the backward; more positions are scored chunk by chunk."""

ONE_UNIT_BELOW: Final = 1 << 22
"""Models with fewer parameters are sharded as one unit, not layer by layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInputs:
    """Rows of one pass.

    Attributes:
        tokens: Prompt and response per row, padded on the right, int64 [rows, width].
        rows: Row of each scored token, int64 [tokens].
        columns: Position whose hidden state predicts the token, int64 [tokens].
        targets: The sampled tokens, int64 [tokens].
        temperatures: Sampling temperature of each token's row [tokens].
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor


class ScoringModel(nn.Module):
    """Log-probabilities and entropies of sampled tokens at the sampling temperature.

    Prompt positions never go through the output head. Rows are padded on the right and attention is
    causal, so padding needs no mask: no scored position sees it.

    Args:
        lm: Model with an output head.
        score_dtype: Dtype of logits and log-probabilities: float32, or float64.
    """

    def __init__(self, lm: Any, score_dtype: torch.dtype) -> None:  # noqa: ANN401 - untyped library
        super().__init__()
        self.lm = lm
        self.score_dtype = score_dtype

    def forward(self, inputs: PassInputs, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (log-probabilities, entropies) [tokens]; entropies carry a gradient if asked."""
        hidden = self.lm.base_model(input_ids=inputs.tokens, use_cache=False).last_hidden_state
        selected = hidden[inputs.rows, inputs.columns]
        vocab = self.lm.get_output_embeddings().weight.shape[0]
        chunk = max(1, LOGITS_PER_CHUNK // vocab)
        if len(selected) <= chunk:
            return self._score(selected, inputs.targets, inputs.temperatures, entropy)
        parts = [
            checkpoint(self._score, *columns, entropy, use_reentrant=False)
            for columns in zip(
                *(
                    torch.split(tensor, chunk)
                    for tensor in (selected, inputs.targets, inputs.temperatures)
                ),
                strict=True,
            )
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _score(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.lm.get_output_embeddings()(hidden).to(self.score_dtype)
        logits = logits / temperatures.to(self.score_dtype)[:, None]
        total = torch.logsumexp(logits, dim=-1)
        chosen = logits.gather(1, targets[:, None])[:, 0] - total
        with torch.set_grad_enabled(entropy and torch.is_grad_enabled()):
            # H = log Z - E[logit]; equal to -sum p log p, without a second [tokens, vocab] log.
            expected = (torch.softmax(logits, dim=-1) * logits).sum(-1)
            return chosen, total - expected if entropy else (total - expected).detach()


def master_dtype(compute_dtype: str) -> torch.dtype:
    """Returns the dtype of master weights, gradient sums and moments."""
    return torch.float64 if compute_dtype == "float64" else torch.float32


def build_sharded(
    model_path: Path, *, compute_dtype: str, mesh: DeviceMesh, device: torch.device
) -> ScoringModel:
    """Builds the model of a folder with unset weights, sharded over `mesh`.

    Raises:
        DomainError: MODEL_INVALID.
    """
    dtype = master_dtype(compute_dtype)
    lm = build_empty(model_path, dtype=dtype, device=device)
    if dtype == torch.float64:
        keep_float64(lm)
    return shard(lm, compute_dtype=compute_dtype, mesh=mesh)


def shard(lm: Any, *, compute_dtype: str, mesh: DeviceMesh) -> ScoringModel:  # noqa: ANN401
    """Shards a model in the master dtype: each layer a unit, and the rest another.

    Raises:
        DomainError: MODEL_INVALID.
    """
    dtype = master_dtype(compute_dtype)
    model = ScoringModel(lm, score_dtype=dtype)
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
    if not lists:
        raise DomainError(
            ErrorReason.MODEL_INVALID,
            f"{type(lm).__name__} has no list of layers to shard",
            {"model": type(lm).__name__},
        )
    return max(lists, key=len)
