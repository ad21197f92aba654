"""Where a watch over several shards stands: one position per shard, as one opaque text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def write_cursor(positions: Mapping[str, int]) -> str:
    """Text of the positions of all shards of a run; of a single one, its position alone."""
    if len(positions) == 1:
        return str(next(iter(positions.values())))
    return ",".join(f"{name}={position}" for name, position in positions.items())


def read_cursor(text: str, shards: Sequence[str]) -> dict[str, int]:
    """Positions by shard; empty text means from the oldest events on.

    Raises:
        ValueError: It is no cursor of a watch over these shards.
    """
    if not text:
        return dict.fromkeys(shards, 0)
    try:
        if len(shards) == 1:
            return {shards[0]: _position(text)}
        pairs = (part.split("=") for part in text.split(","))
        positions = {name: _position(position) for name, position in pairs}
    except ValueError:
        positions = {}
    if set(positions) != set(shards):
        raise ValueError(f"cursor {text!r} is not of a watch over {', '.join(shards)}")
    return {name: positions[name] for name in shards}


def _position(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise ValueError(text)
    return int(text)
