"""Keys of the store's tables, as bytes that sort the way the store reads.

Parts are joined by NUL, which no id contains; numbers are big-endian, so that they sort. A prefix
ends with NUL where the part before it is whole, so that run `a` never sees the rows of run `ab`.
Vertex ids start with their batch, group and sample: a prefix of the id selects each of them.
"""

from __future__ import annotations

_NUL = b"\0"


def join(*parts: str) -> bytes:
    """Key of whole parts."""
    return "\0".join(parts).encode()


def prefix(*parts: str) -> bytes:
    """Prefix of all keys that go on after these whole parts."""
    return join(*parts) + _NUL


def numbered(number: int, *parts: str) -> bytes:
    """Key that sorts by a number below its parts."""
    return prefix(*parts) + number.to_bytes(8, "big")


def number_of(key: bytes) -> int:
    """Number of a key made by `numbered`."""
    return int.from_bytes(key[-8:], "big")


def row(run_id: str, agent: str, vertex_id: str) -> bytes:
    """Key of a vertex: one table per agent, ordered by batch, group, sample and path."""
    return f"{run_id}\0{agent}\0{vertex_id}".encode()


def after(prefix_: bytes) -> bytes:
    """Smallest key greater than every key with the prefix.

    Raises:
        ValueError: There is none: the prefix is empty or all 0xff.
    """
    stem = prefix_.rstrip(b"\xff")
    if not stem:
        raise ValueError("no key comes after this prefix")
    return stem[:-1] + bytes((stem[-1] + 1,))
