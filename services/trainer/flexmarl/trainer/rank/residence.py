"""Modules that a worker keeps between bindings, and which state they hold."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from flexmarl.trainer.rank.model import ScoringModel
from flexmarl.trainer.rank.shards import ShardedState


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKeys:
    """Names of immutable segments; equal names prove equal content."""

    master: str
    moments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleKey:
    """What a module depends on: architecture and sharding, not the policy.

    Policies of one architecture that take turns on a slot share a module and its memory; their
    state is loaded into it at each turn.
    """

    architecture: str
    compute_dtype: str
    checkpointing: bool
    members: tuple[int, ...]
    group_prefix: str


@dataclass(slots=True, kw_only=True)
class Resident:
    """A module with its group, and the saved state that its weights and moments equal.

    `keys` is None from before the first change until the changed state has a name again, so it
    never names content that differs from what is held.
    """

    model: ScoringModel
    state: ShardedState
    group: dist.ProcessGroup
    keys: StateKeys | None = None


class Residents:
    """Keeps the modules used last, within a bound of bytes.

    Args:
        max_bytes: Most bytes of weights and moments held; the one in use stays whatever its size.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[ModuleKey, Resident] = OrderedDict()

    def get(self, key: ModuleKey, build: Callable[[], Resident]) -> Resident:
        """Returns the module of `key`, building it, and frees others beyond the bound."""
        resident = self._held.get(key)
        if resident is None:
            # Room first: the old and the new one together may not fit the device.
            self._shrink(keep=0, limit=0 if self._over_half() else self._max_bytes)
            resident = self._held[key] = build()
        self._held.move_to_end(key)
        self._shrink(keep=1, limit=self._max_bytes)
        return resident

    def held_bytes(self) -> int:
        """Bytes of all held state."""
        return sum(resident.state.state_bytes() for resident in self._held.values())

    def _over_half(self) -> bool:
        return self.held_bytes() * 2 > self._max_bytes

    def _shrink(self, *, keep: int, limit: int) -> None:
        freed = False
        while len(self._held) > keep and self.held_bytes() > limit:
            self._held.popitem(last=False)
            freed = True
        if freed:
            gc.collect()  # FSDP's hooks hold cycles
