"""A bound on how often each peer may ask: one bucket of tokens per peer, refilled by time."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

BURST_S: Final = 2.0
"""A peer that was silent may ask for this many seconds' worth at once."""

_MAX_PEERS: Final = 4096


class RateLimit:
    """Admits at most `per_s` requests a second and peer, on average.

    Peers are forgotten when more than a few thousand are known, the longest silent one first: its
    bucket has filled up again by then, or the limit is the least of the troubles.

    Args:
        per_s: Requests a second; 0: no bound.
        max_peers: Peers that are remembered.
    """

    def __init__(self, per_s: float, *, max_peers: int = _MAX_PEERS) -> None:
        self._per_s = per_s
        self._burst = max(per_s * BURST_S, 1.0)
        self._max_peers = max_peers
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def admits(self, peer: str, *, now: float) -> bool:
        """Whether a peer's request at `now` (monotonic seconds) is within the bound."""
        if self._per_s <= 0:
            return True
        left, at = self._buckets.pop(peer, (self._burst, now))
        left = min(left + (now - at) * self._per_s, self._burst)
        admitted = left >= 1.0
        self._buckets[peer] = (left - 1.0 if admitted else left, now)
        if len(self._buckets) > self._max_peers:
            self._buckets.popitem(last=False)
        return admitted
