"""Which versions are written out as checkpoints, and which of those are kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRule:
    """When to write, and how many to keep.

    Attributes:
        every: Write each version that it divides, and the last one.
        keep: Newest checkpoints that are kept, at least 1.
    """

    every: int
    keep: int

    def is_due(self, version: int, *, last: int) -> bool:
        """Returns whether a version that was committed is written."""
        return version > 0 and (version % self.every == 0 or version == last)

    def surplus(self, versions: Iterable[int], *, newest: int) -> list[int]:
        """Returns the versions to delete of all complete ones, whoever wrote them, oldest first.

        Args:
            versions: The complete ones.
            newest: The run's newest; those beyond it were given up by a return to an older version.
        """
        found = sorted(versions)
        kept = [version for version in found if version <= newest][-self.keep :]
        return [version for version in found if version not in kept]
