"""When a service that died is started again. Pure: `now` is passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

MAX_RESTARTS: Final = 5
"""Most restarts within `WINDOW_S`; one more is a crash loop."""

WINDOW_S: Final = 60.0

_FIRST_DELAY_S: Final = 0.1
_MAX_DELAY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the service again after a delay.

    Attributes:
        delay_s: Wait before it.
        count: Restarts in the window, this one included.
    """

    delay_s: float
    count: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The service dies again and again: end the cluster.

    Attributes:
        reason: For a person.
    """

    reason: str


class RestartPolicy:
    """Bounded restarts with a delay that doubles while deaths are close together."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()

    def died(self, *, now: float) -> Restart | GiveUp:
        """Decides after a death at `now` (seconds of any monotonic clock)."""
        while self._deaths and now - self._deaths[0] > WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        count = len(self._deaths)
        if count > MAX_RESTARTS:
            return GiveUp(f"it ended {count} times within {WINDOW_S:g} s")
        # The first death is more likely an accident than a fault: come back at once.
        delay_s = 0.0 if count == 1 else min(_FIRST_DELAY_S * 2 ** (count - 1), _MAX_DELAY_S)
        return Restart(delay_s, count)
