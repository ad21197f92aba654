"""Events on their way to the core."""

from __future__ import annotations

import asyncio
from collections import deque

from flexmarl.core.run_events import Event


class Inbox:
    """A queue that is emptied at once: what happens together is decided together.

    Ends of effects always fit, since effects in progress are bounded by the batch. News from
    streams wait for room (`put`), freed by the driver's next turn.

    Args:
        max_news: Bound for news.
    """

    def __init__(self, *, max_news: int = 4096) -> None:
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._emptied = asyncio.Event()
        self._max_news = max_news

    def push(self, event: Event) -> None:
        """Add the end of an effect, or a rare event."""
        self._events.append(event)
        self._arrived.set()

    async def put(self, event: Event) -> None:
        """Add news of a stream; waits while the driver is behind."""
        while len(self._events) >= self._max_news:
            self._emptied.clear()
            await self._emptied.wait()
        self.push(event)

    async def take(self) -> list[Event]:
        """All events, at least one, in order of arrival."""
        await self._arrived.wait()
        # One turn of the loop more: what is arriving now can come along.
        await asyncio.sleep(0)
        events = list(self._events)
        self._events.clear()
        self._arrived.clear()
        self._emptied.set()
        return events
