"""Attention over rows that lie one after the other, without padding between them.

Everything in the model but attention treats tokens one by one, so rows are simply concatenated and
no token of padding is computed. Attention alone has to keep rows apart. Rows of one length, the
usual case after sorting, are a view; others are laid side by side for the kernel, and only there is
padding. `flexmarl_packed` is registered with the library as an attention implementation; the rows
of a pass travel to it as a keyword argument of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

PACKED: Final = "flexmarl_packed"
"""Name of the implementation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows of a pass.

    Attributes:
        count: Rows.
        width: Longest row.
        places: Place of each token in [count x width]; None when all rows are `width` long.
    """

    count: int
    width: int
    places: torch.Tensor | None


def register() -> None:
    """Makes the implementation known to the library."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,  # noqa: ANN401 - what other implementations read
) -> tuple[torch.Tensor, None]:
    """Causal attention within each row.

    Args:
        module: The attention layer.
        query: [1, heads, tokens, size]; key and value may have fewer heads.
        key: See query.
        value: See query.
        attention_mask: None: rows are told apart by `packed_rows`.
        packed_rows: Rows of the pass.
        scaling: Factor of the scores.
        sliding_window: Most tokens that one may look back on, itself included.
        softcap: Not supported.
        s_aux: Not supported.

    Returns:
        [1, tokens, heads, size], and no attention weights.

    Raises:
        TypeError: The layer asks for more than this.
    """
    if packed_rows is None or attention_mask is not None or softcap or s_aux is not None:
        raise TypeError(
            f"{type(module).__name__} asks for an attention that packed rows do not have"
        )
    rows = packed_rows
    mask = None
    if sliding_window is not None and sliding_window < rows.width:
        place = torch.arange(rows.width, device=query.device)
        back = place[:, None] - place[None, :]
        mask = (back >= 0) & (back < sliding_window)
    result = scaled_dot_product_attention(
        _apart(query, rows),
        _apart(key, rows),
        _apart(value, rows),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    together = result.transpose(1, 2).reshape(rows.count * rows.width, *query.shape[1::2])
    if rows.places is not None:
        together = together[rows.places]
    return together[None], None


def _apart(packed: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """[1, heads, tokens, size] to [rows, heads, width, size]; unused places are 0."""
    tokens = packed[0].transpose(0, 1)
    if rows.places is not None:
        room = tokens.new_zeros((rows.count * rows.width, *tokens.shape[1:]))
        tokens = room.index_copy(0, rows.places, tokens)
    return tokens.reshape(rows.count, rows.width, *tokens.shape[1:]).transpose(1, 2)
