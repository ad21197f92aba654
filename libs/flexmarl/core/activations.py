"""How many tokens one forward pass may have: what it keeps for its backward has to fit in memory.

On a CPU nothing says in time that memory runs out: the system ends the process. So a policy whose
config names no bound gets one by the shape of its model. It is an estimate, of layers as Llama and
its relatives have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_TOKENS: Final = 16384
"""Most tokens of a pass where memory does not ask for fewer: more make nothing faster."""

ACTIVATION_BYTES: Final = 512 << 20
"""What the activations of a pass may take on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Elements that a token has in each of a model's equal layers.

    Attributes:
        layers: Number of layers.
        width: Of the hidden state.
        query: Of all heads' queries.
        key: Of all heads' keys; values have as many.
        inner: Of the feed-forward network.
    """

    layers: int
    width: int
    query: int
    key: int
    inner: int


def bytes_per_token(sizes: LayerSizes, *, element_bytes: int, checkpointing: bool) -> int:
    """Returns what a token keeps in memory from its forward to its backward.

    A layer keeps what its products and norms read: three times the hidden state around each of two
    norms; query, key, value and the result of attention, the latter in two orders; gate, up, their
    product and what it is a product of. A third more was seen to lie between them.

    Args:
        sizes: The model.
        element_bytes: Size of an element of the compute dtype.
        checkpointing: Only inputs of layers are kept, and one layer at a time is made again.
    """
    layer = 6 * sizes.width + 3 * sizes.query + 2 * sizes.key + 4 * sizes.inner
    kept = sizes.layers * sizes.width + layer if checkpointing else sizes.layers * layer
    return kept * element_bytes * 4 // 3


def tokens_that_fit(sizes: LayerSizes, *, element_bytes: int, checkpointing: bool) -> int:
    """Returns how many tokens a pass on a CPU may have; see `bytes_per_token`."""
    each = bytes_per_token(sizes, element_bytes=element_bytes, checkpointing=checkpointing)
    return max(1, min(MAX_TOKENS, ACTIVATION_BYTES // max(each, 1)))


def smaller_pass(did_not_fit: int, *, asked: int) -> int:
    """Returns how many tokens a pass may have after passes of `did_not_fit` found no memory.

    Args:
        did_not_fit: Bound of those passes, which only who made them knows for sure.
        asked: Most that the service asks for.
    """
    return max(1, min(did_not_fit // 2, asked))
