"""The policy's first weights, which a divergence is measured from.

They lie beside the weights and change places with them for a scoring pass: one more copy of the
shard in memory, no second model. The first weights can be made again at any time, from the model's
folder and the run's seed, so the reference needs no saved state of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

import torch

from flexmarl.trainer.rank.model import ScoringModel
from flexmarl.trainer.rank.shards import ShardedState


class Reference:
    """This rank's ranges of the first weights.

    Args:
        state: Of the policy; gives the ranges.
        weights: Full first weights.
    """

    def __init__(self, state: ShardedState, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        by_name = {shard.name: shard for shard in state.shards}
        cut = {
            name: by_name[name].cut(full).to(by_name[name].local.dtype, copy=True)
            for name, full in weights
            if name in by_name
        }
        self._held = [cut[shard.name] for shard in state.shards]

    def size_bytes(self) -> int:
        """Bytes held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._held)

    @contextmanager
    def in_place_of(self, state: ShardedState, model: ScoringModel) -> Iterator[None]:
        """Puts the reference where the weights are, for the block; bit for bit back afterwards."""
        self._exchange(state, model)
        try:
            yield
        finally:
            self._exchange(state, model)

    def _exchange(self, state: ShardedState, model: ScoringModel) -> None:
        for held, shard in zip(self._held, state.shards, strict=True):
            kept = shard.local.clone()
            shard.local.copy_(held)
            held.copy_(kept)
        # FSDP may hold gathered weights after a pass without a backward: they are others now.
        model.forget_gathered()


class References:
    """References used last, within a bound of bytes.

    Args:
        max_bytes: Most bytes held; the one in use stays whatever its size.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[Hashable, Reference] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Reference]) -> Reference:
        """Returns the reference of `key`, making it if need be."""
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = make()
        self._held.move_to_end(key)
        while len(self._held) > 1 and self._bytes() > self._max_bytes:
            self._held.popitem(last=False)
        return found

    def _bytes(self) -> int:
        return sum(reference.size_bytes() for reference in self._held.values())
