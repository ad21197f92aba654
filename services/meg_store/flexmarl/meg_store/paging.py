"""Pages of long reads: opaque tokens bound to their query, and scans that let others run."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from flexmarl.core.keepalive import MAX_MESSAGE_BYTES

T = TypeVar("T")

DEFAULT_PAGE = 1000
MAX_PAGE = 10_000
PAGE_BYTES = MAX_MESSAGE_BYTES // 2
"""A page ends with the row that reaches this, so that it fits into a message."""
_YIELD_EVERY = 256


class Token:
    """Page tokens of one query: the last position delivered, bound to the query by a hash."""

    def __init__(self, query: bytes) -> None:
        self._digest = hashlib.sha256(query).digest()[:8]

    def write(self, position: bytes) -> bytes:
        """Token that goes on after a position."""
        return base64.urlsafe_b64encode(self._digest + position)

    def read(self, token: str) -> bytes:
        """Position to go on after; empty for no token.

        Raises:
            ValueError: The token is of another query, or none at all.
        """
        if not token:
            return b""
        try:
            data = base64.b64decode(token, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            data = b""
        if data[:8] != self._digest:
            raise ValueError("page_token is not of this query")
        return data[8:]


def page_size(asked: int) -> int:
    """Rows of a page."""
    return min(asked or DEFAULT_PAGE, MAX_PAGE)


async def patient(items: Iterable[T]) -> AsyncIterator[T]:
    """Items of a scan; the event loop gets its turn every few hundred."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
