"""Responses built from stored bytes, without parsing them.

A stored row is the serialised message; a response that repeats rows is their concatenation, each
behind its field tag and length. Field numbers are those of the contracts; a test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

_LENGTH_DELIMITED = 2


Row = tuple[bytes, bytes | None]
"""A stored row: its meta columns, and its data columns unless they are not asked for."""


@lru_cache(maxsize=16384)
def varint(number: int) -> bytes:
    """Protobuf's base-128 number; lengths repeat, so they are remembered."""
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def field(number: int, data: bytes) -> bytes:
    """A message, string or bytes field."""
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(len(data)) + data


def vertex(meta: bytes, payload: bytes | None) -> bytes:
    """`Vertex` of its stored parts."""
    return field(1, meta) if payload is None else field(1, meta) + field(2, payload)


def vertices_response(rows: Iterable[Row]) -> bytes:
    """`GetVerticesResponse`, or the rows of a `ListVerticesResponse`."""
    parts: list[bytes] = []
    add_vertices(parts, rows)
    return b"".join(parts)


def add_vertices(parts: list[bytes], rows: Iterable[Row]) -> int:
    """Add rows to the parts of such a response, to be joined once all are there.

    Returns:
        Their size in bytes.
    """
    size_bytes = 0
    for meta, payload in rows:  # one copy of each row: all parts are joined at the end
        size = varint(len(meta))
        length = 1 + len(size) + len(meta)
        if payload is None:
            head = varint(length)
            parts += (b"\x0a", head, b"\x0a", size, meta)
        else:
            payload_size = varint(len(payload))
            length += 1 + len(payload_size) + len(payload)
            head = varint(length)
            parts += (
                b"\x0a", head, b"\x0a", size, meta, b"\x12", payload_size, payload
            )  # fmt: skip
        size_bytes += 1 + len(head) + length
    return size_bytes


def claimable_response(rows: Iterable[bytes], *, more: bool) -> bytes:
    """`ListClaimableResponse` of stored rows."""
    return b"".join(field(1, data) for data in rows) + (b"\x10\x01" if more else b"")


def watch_response(events: Iterable[bytes], cursor: int) -> bytes:
    """`WatchResponse` of stored events."""
    tail = b"\x10" + varint(cursor) if cursor else b""
    return b"".join(field(1, data) for data in events) + tail
