"""How much each policy has to do, and how fast its instances do it.

Reads the running sums that the dispatcher keeps, so that looking at a thousand instances costs what
looking at their policies costs; a policy of which nothing has changed costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, inf
from typing import Final

from flexmarl.core.dispatch_records import PolicyBook

DEFAULT_TOKENS_PER_S: Final = 1000.0
"""Rate of a request before any was seen; the same for all, so that only work is compared."""

_MEMORY_S: Final = 10.0
"""Seconds of requests after which a rate is worth a third of a new one."""


@dataclass(slots=True)
class PolicyLoad:
    """A policy at one moment; never changed (being frozen would double the cost of a look).

    Attributes:
        policy: Policy.
        base: What its instances are built from: moves within a base change weights only.
        num_instances: Instances that serve it, or will once they have loaded.
        num_waiting: Ready vertices without an instance.
        work_tokens: Outstanding work, waiting and running.
        tokens_per_s: What one instance does with all its places taken.
        drain_s: Expected time until its work is done; infinite without an instance.
        drain_with_less_s: The same with one instance less.
        drain_with_more_s: The same with one more.
        load_s: Expected time in which an instance takes its weights over.
        restart_s: Expected time in which an engine of its base starts, weights included.
    """

    policy: str
    base: str
    num_instances: int
    num_waiting: int
    work_tokens: int
    tokens_per_s: float
    drain_s: float
    drain_with_less_s: float
    drain_with_more_s: float
    load_s: float
    restart_s: float

    def with_all(self, work_tokens: float) -> PolicyLoad:
        """The same policy with work that is still to come, as if all of it could be done now."""
        instances = self.num_instances
        each_s = work_tokens / self.tokens_per_s
        return PolicyLoad(
            self.policy,
            self.base,
            instances,
            self.num_waiting,
            round(work_tokens),
            self.tokens_per_s,
            each_s / instances if instances else inf,
            each_s / (instances - 1) if instances > 1 else inf,
            each_s / (instances + 1),
            self.load_s,
            self.restart_s,
        )


class _Watched:
    """A policy, and what was seen of it at the last look.

    The rate of its requests is learnt when work has ended, over the time that requests ran since
    work ended last: what is under way says nothing yet of how fast it is.
    """

    __slots__ = (
        "base", "book", "done_tokens", "load", "num_places", "policy", "recent_s", "recent_tokens",
        "running_s",
    )  # fmt: skip

    def __init__(self, policy: str, base: str, book: PolicyBook) -> None:
        self.policy = policy
        self.base = base
        self.book = book
        self.done_tokens = 0
        self.running_s = 0.0
        self.num_places = 0
        self.recent_tokens = 0.0
        self.recent_s = 0.0
        self.load: PolicyLoad | None = None

    def learn(self, now: float) -> None:
        """Takes in what was done since it was last."""
        book = self.book
        running_s = book.running_s + book.num_running * (now - book.running_since)
        passed_s = running_s - self.running_s
        if passed_s <= 0.0:
            return  # it counts with the next one
        kept = exp(-passed_s / _MEMORY_S)
        self.recent_tokens = kept * self.recent_tokens + book.done_tokens - self.done_tokens
        self.recent_s = kept * self.recent_s + passed_s
        self.done_tokens, self.running_s = book.done_tokens, running_s

    def tokens_per_s(self) -> float:
        """What one of its requests does."""
        done = self.recent_tokens
        return done / self.recent_s if done else DEFAULT_TOKENS_PER_S


def drain_s(work_tokens: int, requests: int, places: float, tokens_per_s: float) -> float:
    """Time until work is done by as many requests at once as there are, and have places.

    Args:
        work_tokens: The work.
        requests: Those that carry it.
        places: Requests that instances take at once.
        tokens_per_s: What one request does.
    """
    at_once = min(requests, places)
    if at_once <= 0:
        return inf if work_tokens else 0.0
    return work_tokens / (at_once * tokens_per_s)


class MoveCosts:
    """What moving costs, learnt from the loads and starts that were seen.

    Attributes:
        num_learnt: Raised with each.

    Args:
        load_s: First guess for taking over weights.
        restart_s: First guess for starting an engine.
        rate: Share of the newest value in an average.
    """

    def __init__(self, *, load_s: float = 0.5, restart_s: float = 20.0, rate: float = 0.3) -> None:
        self.num_learnt = 0
        self._rate = rate
        self._load_s = load_s
        self._restart_s = restart_s
        self._loads: dict[str, float] = {}
        self._restarts: dict[str, float] = {}

    def load_s(self, policy: str) -> float:
        """Time in which an instance takes over a policy's weights."""
        return self._loads.get(policy, self._load_s)

    def restart_s(self, base: str) -> float:
        """Time in which an engine of a base starts."""
        return self._restarts.get(base, self._restart_s)

    def loaded(self, policy: str, took_s: float) -> None:
        """An instance has taken over a policy's weights."""
        self._learn(self._loads, policy, took_s)

    def started(self, base: str, took_s: float) -> None:
        """An engine of a base has started."""
        self._learn(self._restarts, base, took_s)

    def _learn(self, seen: dict[str, float], key: str, took_s: float) -> None:
        self.num_learnt += 1
        known = seen.get(key, took_s)
        seen[key] = known + self._rate * (took_s - known)


class Monitor:
    """Turns running sums into loads.

    Args:
        bases: Base of each policy's instances.
        book: The running sums of a policy.
        costs: What moving costs.
    """

    def __init__(
        self,
        bases: Mapping[str, str],
        *,
        book: Callable[[str], PolicyBook],
        costs: MoveCosts,
    ) -> None:
        self._costs = costs
        self._num_learnt = costs.num_learnt
        self._watched = [_Watched(name, bases[name], book(name)) for name in sorted(bases)]

    def observe(self, now: float) -> list[PolicyLoad]:
        """Loads of all policies, by name. One flat loop: it runs at every look."""
        costs_stand = self._costs.num_learnt == self._num_learnt
        self._num_learnt = self._costs.num_learnt
        loads: list[PolicyLoad] = []
        for watched in self._watched:
            book, load = watched.book, watched.load
            if (
                load is not None
                and costs_stand
                and book.done_tokens == watched.done_tokens
                and book.num_waiting == load.num_waiting
                and book.waiting_tokens + book.running_tokens == load.work_tokens
                and book.num_instances == load.num_instances
                and book.num_places == watched.num_places
            ):
                loads.append(load)
            else:
                loads.append(self._look(watched, now))
        return loads

    def _look(self, watched: _Watched, now: float) -> PolicyLoad:
        book, policy, base = watched.book, watched.policy, watched.base
        if book.done_tokens != watched.done_tokens:
            watched.learn(now)
        watched.num_places = places = book.num_places
        rate, instances = watched.tokens_per_s(), book.num_instances
        work = book.waiting_tokens + book.running_tokens
        requests = book.num_waiting + book.num_running
        each = places / instances if instances else 1.0
        load = watched.load = PolicyLoad(
            policy,
            base,
            instances,
            book.num_waiting,
            work,
            each * rate,
            drain_s(work, requests, places, rate),
            drain_s(work, requests, places - each, rate),
            drain_s(work, requests, places + each, rate),
            self._costs.load_s(policy),
            self._costs.restart_s(base),
        )
        return load
