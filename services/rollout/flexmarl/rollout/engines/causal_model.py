"""A transformers causal language model, run as prefill and decode over a `SlotCache`.

Both passes take right-padded rows, give each token its true position, and hand the model its mask
in full, so a row's numbers depend on its own tokens only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.engines.slot_cache import SlotCache

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the engine needs to know of a model."""

    max_context: int
    vocab_size: int


class CausalModel:
    """Model and cache.

    Args:
        folder: With config.json; its weights are not read.
        dtype: Of parameters and compute.
        device: Torch device.
        max_context: Longest prompt plus response; 0: the model's own limit.

    Raises:
        DomainError: MODEL_INVALID when the folder has no model that this engine can run.
    """

    def __init__(self, folder: Path, *, dtype: str, device: str, max_context: int) -> None:
        config = _read_config(folder)
        text_config: Any = config.get_text_config()
        limit = int(getattr(text_config, "max_position_embeddings", 0)) or max_context
        self.shape = ModelShape(
            max_context=min(max_context or limit, limit), vocab_size=int(text_config.vocab_size)
        )
        _check_attention(text_config, folder, self.shape.max_context)
        self.device = torch.device(device)
        self.model = _build(config, DTYPES[dtype], self.device, folder)
        num_heads = text_config.num_attention_heads
        self.cache = SlotCache(
            num_layers=text_config.num_hidden_layers,
            num_heads=getattr(text_config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // num_heads,
            dtype=DTYPES[dtype],
            device=self.device,
        )
        self._rows = torch.arange(0)
        self._columns = torch.arange(0)
        # The keyword was renamed within transformers 5.
        parameters = inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def prefill(self, prompts: list[list[int]], *, first_row: int) -> Tensor:
        """Run whole prompts into the rows from `first_row` on.

        Returns:
            Logits after each prompt's last token, (len(prompts), vocabulary).
        """
        lengths = [len(prompt) for prompt in prompts]
        width = max(lengths)
        padded = [prompt + [0] * (width - len(prompt)) for prompt in prompts]
        # Causal: no real token looks at the padding behind it.
        mask = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        self.cache.begin_prefill(first_row=first_row, num_rows=len(prompts), num_columns=width)
        last = torch.tensor(lengths, device=self.device).sub_(1).unsqueeze_(1)
        return self._forward(
            torch.tensor(padded, device=self.device),
            positions=torch.arange(width, device=self.device).unsqueeze_(0),
            mask=mask.view(1, 1, width, width),
            logits_to_keep=last,
        )

    def decode(self, tokens: list[int], positions: list[int]) -> Tensor:
        """Run one token per row, for rows 0..n-1.

        Args:
            tokens: The newest token of each row.
            positions: Its position, which is the row's length in the cache.

        Returns:
            Logits after each token, (n, vocabulary).
        """
        num_rows, num_columns = len(tokens), max(positions) + 1
        if num_rows > len(self._rows):
            self._rows = torch.arange(self.cache.num_rows, device=self.device)
        if num_columns > len(self._columns):
            self._columns = torch.arange(self.cache.num_columns, device=self.device)
        place = torch.tensor(positions, device=self.device)
        column = place.unsqueeze(1)
        mask = self._columns[:num_columns] <= column
        self.cache.begin_decode(
            row_index=self._rows[:num_rows], positions=place, num_columns=num_columns
        )
        return self._forward(
            torch.tensor(tokens, device=self.device).unsqueeze_(1),
            positions=column,
            mask=mask.view(num_rows, 1, 1, num_columns),
            logits_to_keep=1,
        )

    def _forward(
        self, tokens: Tensor, *, positions: Tensor, mask: Tensor, logits_to_keep: int | Tensor
    ) -> Tensor:
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{self._cache_argument: self.cache},
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def _read_config(folder: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    with _told_as_invalid(folder):
        # Unless it is told not to, the library asks on the terminal whether to run a folder's code.
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _build(config: Any, dtype: torch.dtype, device: torch.device, folder: Path) -> Any:  # noqa: ANN401
    auto_model: Any = AutoModelForCausalLM
    # No initialisation: no token is drawn before weights were loaded.
    with _told_as_invalid(folder), no_init_weights(), device:
        model = auto_model.from_config(
            config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    model.tie_weights()
    return model.eval().requires_grad_(False)


@contextmanager
def _told_as_invalid(folder: Path) -> Iterator[None]:
    """Tells whatever the library raises over a foreign folder by the folder's name."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise  # no fault of the folder
    except Exception as error:
        raise _invalid(folder, f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _check_attention(config: Any, folder: Path, max_context: int) -> None:  # noqa: ANN401
    """Refuse layers that the cache cannot hold: it keeps every position of every layer."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if kinds - {"full_attention", "sliding_attention"}:
        raise _invalid(folder, f"layers of kind {sorted(kinds)} are not supported")
    if window is not None and max_context > window:
        raise _invalid(
            folder, f"sliding window {window} < max_context {max_context}; lower max_context"
        )


def _invalid(folder: Path, why: str) -> DomainError:
    return DomainError(ErrorReason.MODEL_INVALID, f"{folder}: {why}", {"folder": str(folder)})
