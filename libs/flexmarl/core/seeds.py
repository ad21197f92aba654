"""Seeds: every random draw of a run is a function of the run's seed and of names.

Attempts are left out on purpose, so that a repeated attempt draws the same tokens (design, replay).
"""

from __future__ import annotations

import hashlib


def derive(root: int, *names: str | int) -> int:
    """Returns a 63-bit seed for the thing named below `root`: blake2b of length-prefixed parts."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (root, *names):
        digest.update(_part(part))
    return int.from_bytes(digest.digest(), "little") >> 1


def sample_seed(run_seed: int, *, batch: int, group: int, sample: int) -> int:
    """Returns the root seed of a sample; its vertices derive theirs from it and their path."""
    return derive(run_seed, "sample", batch, group, sample)


def evaluation_seed(run_seed: int, *, query: int, sample: int) -> int:
    """Returns the root seed of a sample of an evaluation: the same at every version."""
    return derive(run_seed, "evaluation", query, sample)


class VertexSeeds:
    """The seeds of one sample's vertices; what they have in common is hashed once.

    Args:
        sample_seed_: Root seed of the sample.
    """

    __slots__ = ("_begun",)

    def __init__(self, sample_seed_: int) -> None:
        self._begun = hashlib.blake2b(_part(sample_seed_) + _part("vertex"), digest_size=8)

    def of(self, path: str) -> int:
        """The seed of the vertex of a path."""
        digest = self._begun.copy()
        digest.update(_part(path))
        return int.from_bytes(digest.digest(), "little") >> 1


def continued_seed(vertex_seed_: int, *, num_kept: int) -> int:
    """Returns the seed with which a moved vertex goes on after `num_kept` tokens.

    For engines whose generator starts anew with each request: under the vertex' own seed they would
    draw the same numbers a second time. Without kept tokens it is the vertex' seed.
    """
    return derive(vertex_seed_, "continued", num_kept) if num_kept else vertex_seed_


def _part(part: str | int) -> bytes:
    data = str(part).encode()
    return len(data).to_bytes(4, "little") + data
