"""The pace of status streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

DEFAULT_INTERVAL_MS: Final = 500
MIN_INTERVAL_MS: Final = 20


def interval_s(asked_ms: int) -> float:
    """Time between two states of a stream whose caller asked for `asked_ms`; 0: the default."""
    return max(asked_ms or DEFAULT_INTERVAL_MS, MIN_INTERVAL_MS) / 1000


async def ticks(interval_s: float, *, until: asyncio.Event) -> AsyncGenerator[None, None]:
    """One turn at once and one after each interval.

    Waits for the interval to pass; freed early, and ended, by `until`.
    """
    while not until.is_set():
        yield
        try:
            async with asyncio.timeout(interval_s):
                await until.wait()
        except TimeoutError:
            continue
