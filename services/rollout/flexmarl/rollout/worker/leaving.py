"""Which policies a sample has left: `ctx.last` was said for their agents, no call is under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Leaving:
    """What one sample may still call.

    A call that was made before `last` counts until it ends, so both `last` right after the call was
    made and `last` after its answer mean the same: no further call.

    Args:
        policies: Policy of each agent.
    """

    def __init__(self, policies: Mapping[str, str]) -> None:
        self._policies = policies
        self._last: set[str] = set()
        self._callable = Counter(policies.values())  # agents that may still be called
        self._under_way: Counter[str] = Counter()
        self._left: list[str] = []

    def made(self, agent: str) -> None:
        """A call of an agent is made.

        Raises:
            RuntimeError: It was said that there would be none.
        """
        if agent in self._last:
            raise RuntimeError(
                f"ctx.call({agent!r}) after ctx.last({agent!r}): its policy may be updated already"
            )
        self._under_way[self._policies[agent]] += 1

    def ended(self, agent: str) -> list[str]:
        """A call ended, or will never be awaited; returns as `last` does."""
        self._under_way[self._policies[agent]] -= 1
        return self._check(self._policies[agent])

    def last(self, agent: str) -> list[str]:
        """An agent will not be called again.

        Returns:
            All policies left so far, when this one is new among them; otherwise nothing.
        """
        policy = self._policies[agent]
        if agent not in self._last:
            self._last.add(agent)
            self._callable[policy] -= 1
        return self._check(policy)

    def _check(self, policy: str) -> list[str]:
        if self._callable[policy] or self._under_way[policy] or policy in self._left:
            return []
        self._left.append(policy)
        return list(self._left)
