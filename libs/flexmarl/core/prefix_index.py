"""Which instance last computed which prompt prefix: a bound map from blocks to instances.

A prompt is named by chained hashes of its full blocks, so that one key stands for everything up to
its block. What an instance had cached is gone with its weights (I11): entries carry its epoch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from flexmarl.core.dispatch_records import Instance

BLOCK_TOKENS: Final = 64
"""Tokens per block."""

_MAX_BLOCKS_PER_PROMPT: Final = 64
_MAX_ENTRIES: Final = 1 << 16


def prefix_keys(tokens: Sequence[int]) -> tuple[int, ...]:
    """Keys of a prompt's full blocks, first to last.

    The last token is left out: an engine computes at least one, to draw from.
    """
    keys: list[int] = []
    key = 0
    for start in range(0, len(tokens) - BLOCK_TOKENS, BLOCK_TOKENS):
        # Hashes of integers do not depend on the process, and a collision costs a cache miss.
        key = hash((key, *tokens[start : start + BLOCK_TOKENS]))
        keys.append(key)
        if len(keys) == _MAX_BLOCKS_PER_PROMPT:
            break
    return tuple(keys)


class PrefixIndex:
    """See the module; the entries used longest ago are forgotten first."""

    def __init__(self, *, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._holders: OrderedDict[tuple[str, int], tuple[Instance, int]] = OrderedDict()

    def find(self, policy: str, keys: tuple[int, ...]) -> tuple[Instance | None, int]:
        """The instance that holds most of a prompt, and how many tokens that is."""
        for num_blocks in range(len(keys), 0, -1):
            held = self._holders.get((policy, keys[num_blocks - 1]))
            if held is not None and held[0].epoch == held[1]:
                return held[0], num_blocks * BLOCK_TOKENS
        return None, 0

    def add(self, policy: str, keys: tuple[int, ...], instance: Instance) -> None:
        """An instance is about to compute a prompt."""
        holders = self._holders
        entry = (instance, instance.epoch)
        for key in keys:
            holders[(policy, key)] = entry
            holders.move_to_end((policy, key))
        while len(holders) > self._max_entries:
            holders.popitem(last=False)
