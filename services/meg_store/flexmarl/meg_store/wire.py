"""Responses built from stored bytes, without parsing them.

A stored row is the serialised message; a response that repeats rows is their concatenation, each
behind its field tag and length. Field numbers are those of the contracts; a test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Iterable

_LENGTH_DELIMITED = 2


def varint(number: int) -> bytes:
    """Protobuf's base-128 number."""
    if number < 0x80:
        return bytes((number,))
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


def vertices_response(vertices: Iterable[bytes]) -> bytes:
    """`GetVerticesResponse`, or the rows of a `ListVerticesResponse`."""
    return b"".join(field(1, data) for data in vertices)


def claimable_response(rows: Iterable[bytes], *, more: bool) -> bytes:
    """`ListClaimableResponse` of stored rows."""
    return b"".join(field(1, data) for data in rows) + (b"\x10\x01" if more else b"")


def watch_response(events: Iterable[bytes], cursor: int) -> bytes:
    """`WatchResponse` of stored events."""
    tail = b"\x10" + varint(cursor) if cursor else b""
    return b"".join(field(1, data) for data in events) + tail
