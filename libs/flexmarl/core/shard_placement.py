"""Which store shard holds a group and all below it: rendezvous hashing of the group's id.

Every shard gets a score with every group; the highest one holds it (Thaler and Ravishankar, "Using
name-based mappings to increase hit rates", 1998). When a shard is lost, only its own groups find
another place: the highest of the others was the second choice before.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache

from flexmarl.core.ids import check_name, group_of


@dataclass(frozen=True, slots=True)
class Placement:
    """The shards of a run, and where its rows are.

    Attributes:
        shards: Names, the home shard first; fixed for the run's life.
        lost: Those that are recorded lost; never the home shard.
    """

    shards: tuple[str, ...]
    lost: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if not self.shards:
            raise ValueError("a run has at least one store shard")
        for name in self.shards:
            check_name(name, what="shard")
        if len(set(self.shards)) < len(self.shards):
            raise ValueError(f"a shard is named twice: {', '.join(self.shards)}")
        if self.home in self.lost or not self.lost <= set(self.shards):
            raise ValueError(f"shards {sorted(self.lost)} cannot be lost in {list(self.shards)}")

    @property
    def home(self) -> str:
        """The shard of manifest, records, ledgers and terms."""
        return self.shards[0]

    @property
    def alive(self) -> tuple[str, ...]:
        """The shards that are not lost."""
        return tuple(name for name in self.shards if name not in self.lost)

    def of_group(self, group_id: str) -> str:
        """Shard of a group."""
        return rendezvous(group_id, self.alive)

    def of_row(self, row_id: str) -> str:
        """Shard of a group, sample or vertex, by its id.

        Raises:
            ValueError: It is not such an id.
        """
        return self.of_group(group_of(row_id))


@lru_cache(maxsize=4096)
def rendezvous(key: str, names: tuple[str, ...]) -> str:
    """The name with the highest score for a key; the order of the names does not matter."""
    return max(names, key=lambda name: (_score(key, name), name))


def _score(key: str, name: str) -> bytes:
    return hashlib.sha256(f"{name}\0{key}".encode()).digest()
