"""Modules that a worker keeps between bindings, without memory of their own."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from flexmarl.api.meg_store.v1 import meg_store_pb2
from flexmarl.trainer.rank.groups import GroupKey
from flexmarl.trainer.rank.memory import Room
from flexmarl.trainer.rank.model import ScoringModel
from flexmarl.trainer.rank.shards import ShardedState
from flexmarl.trainer.state_layout import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleKey:
    """What a module depends on: architecture and sharding, not the policy.

    Policies of one architecture that take turns on a slot share a module; it is pointed at the
    memory of the one that is bound. A module with an adapter (`adapter` names it, and the weights
    below it) belongs to policies with the same base.
    """

    architecture: str
    compute_dtype: str
    checkpointing: bool
    optimizer: str
    adapter: str
    group: GroupKey


@dataclass(slots=True, kw_only=True)
class Resident:
    """A module with its group, and the place that it points at.

    Attributes:
        model: Sharded module.
        group: Its process group.
        parameters: Full parameters that are trained.
        published: Full weights that engines load.
        block: What this rank has of the parameters.
        published_block: Its share of what is published.
    """

    model: ScoringModel
    group: dist.ProcessGroup
    parameters: Sequence[meg_store_pb2.NamedBuffer]
    published: Sequence[meg_store_pb2.NamedBuffer]
    block: Block
    published_block: Block
    _placed: tuple[int, ShardedState] | None = field(default=None, init=False)

    def at(self, room: Room) -> ShardedState:
        """Points the module at a region; at once when it points there already."""
        address = room.memory.data_ptr()
        if self._placed is None or self._placed[0] != address:
            state = ShardedState(
                self.model,
                block=self.block,
                memory=room.memory,
                prefix="lm.",
                base=None if self.model.base is None else (self.model.base, self.published_block),
            )
            self._placed = (address, state)
        return self._placed[1]


class Residents:
    """Keeps the modules used last.

    Args:
        max_modules: Most modules kept; the one in use stays.
    """

    def __init__(self, *, max_modules: int) -> None:
        self._max_modules = max_modules
        self._held: OrderedDict[ModuleKey, Resident] = OrderedDict()

    def get(self, key: ModuleKey, build: Callable[[], Resident]) -> Resident:
        """Returns the module of `key`, building it, and drops others beyond the bound."""
        resident = self._held.get(key)
        if resident is None:
            resident = self._held[key] = build()
        self._held.move_to_end(key)
        beyond = list(self._held)[: max(0, len(self._held) - max(1, self._max_modules))]
        self._drop(beyond)
        return resident

    def drop(self, needless: Callable[[ModuleKey, Resident], bool]) -> None:
        """Drops the modules that this says so of."""
        self._drop([key for key, resident in self._held.items() if needless(key, resident)])

    def _drop(self, keys: Sequence[ModuleKey]) -> None:
        for key in keys:
            del self._held[key]
        if keys:
            gc.collect()  # FSDP's hooks hold cycles
