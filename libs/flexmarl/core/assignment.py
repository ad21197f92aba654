"""Puts ready vertices on instances.

Invariants:
    A ready vertex waits only for capacity of its own policy and version (I2), and goes only to an
    instance that serves its version with the weights that the version names (I4, I11). The running
    sums of a policy equal what its vertices say.

A *suspect*, a vertex under which instances keep dying, gets an instance for itself: it takes no
other vertex down with it, and when the instance dies again there is no doubt why. It reserves the
instance with the fewest requests, which empties and is then its own until it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from random import Random

from flexmarl.core.agent_learning import AgentLearning
from flexmarl.core.dispatch_events import (
    DispatchConfig,
    Effect,
    InstanceChanged,
    InstanceUse,
    Send,
    attempt_id,
)
from flexmarl.core.dispatch_records import Instance, Lane, PolicyBook, Vertex
from flexmarl.core.instance_pool import InstancePool
from flexmarl.core.prefix_index import PrefixIndex
from flexmarl.core.ready_queues import ReadyQueues


class Assignment:
    """See the module.

    Args:
        config: Numbers.
        rng: Breaks ties.
        learning: Expected lengths.
        weights: Content by lane.

    Attributes:
        pool: Instances.
        books: Running sums by policy.
    """

    def __init__(
        self,
        config: DispatchConfig,
        rng: Random,
        *,
        learning: AgentLearning,
        weights: Mapping[Lane, str],
    ) -> None:
        self.pool = InstancePool(rng, weights)
        self.books: dict[str, PolicyBook] = {}
        self._config = config
        self._learning = learning
        self._queues = ReadyQueues()
        self._prefixes = PrefixIndex()
        self._suspects: dict[Lane, deque[Vertex]] = {}
        self._freed_for: set[str] = set()

    def book(self, policy: str) -> PolicyBook:
        """The running sums of a policy."""
        book = self.books.get(policy)
        if book is None:
            book = self.books[policy] = PolicyBook(policy)
        return book

    # Vertices.

    def place(self, vertex: Vertex, now: float, effects: list[Effect]) -> None:
        """Sends a vertex that has just become ready, or lets it wait behind those before it."""
        lane = vertex.lane
        if self._queues.is_empty(lane):
            instance = self.pool.least_loaded(lane, avoid=None)
            if instance is not None:  # it overtakes nobody
                vertex.load = self._expected_tokens(vertex)
                instance, cached, reason = self._choose(vertex, instance)
                effects.append(self._send(vertex, instance, cached, reason, now))
                return
        self.enqueue(vertex)

    def enqueue(self, vertex: Vertex) -> None:
        """Lets a vertex wait for an instance."""
        vertex.load = self._expected_tokens(vertex)
        book = self.book(vertex.ready.policy)
        book.num_waiting += 1
        book.waiting_tokens += vertex.load
        if self._is_suspect(vertex):
            vertex.waiting = True
            self._suspects.setdefault(vertex.lane, deque()).append(vertex)
        else:
            self._queues.push(vertex)

    def attach(self, vertex: Vertex, instance: Instance, now: float) -> None:
        """Counts a vertex at the instance that works on it already."""
        vertex.load = self._expected_tokens(vertex)
        self._put(vertex, instance, now)

    def withdraw(self, vertex: Vertex) -> None:
        """Takes a waiting vertex out."""
        if self._is_suspect(vertex):
            self._suspects[vertex.lane].remove(vertex)
            vertex.waiting = False
            for instance in self.pool:
                if instance.reserved is vertex:
                    instance.reserved = None
                    self._free(instance, vertex.ready.policy)
        else:
            self._queues.take_out(vertex)
        self._uncount_waiting(vertex)

    def leave(self, vertex: Vertex, now: float) -> None:
        """Takes a vertex off its instance, which is offered again."""
        instance = vertex.instance
        assert instance is not None
        vertex.instance = None
        vertex.leaving = False
        del instance.running[vertex.ready.vertex_id]
        instance.load -= vertex.load
        self.book(vertex.ready.policy).count_running(-1, -vertex.load, now)
        if vertex.alone:
            vertex.alone = False
            instance.reserved = None
        self._free(instance, vertex.ready.policy)

    def _free(self, instance: Instance, policy: str) -> None:
        """Offers an instance that a vertex of a policy has left; others may wait for it, too."""
        self.pool.offer(instance)
        if instance.policies != (policy,):
            self._freed_for.update(instance.policies)

    def drain_policy(self, policy: str, now: float, effects: list[Effect]) -> None:
        """Sends what can go now, of all versions; and of policies that shared what came free."""
        if self._freed_for:
            others, self._freed_for = sorted(self._freed_for), set()
            for other in others:
                self.drain_policy(other, now, effects)
        for lane in self._queues.lanes_of(policy):
            self.drain(lane, now, effects)
        if self._suspects:
            for lane in sorted(lane for lane in self._suspects if lane[0] == policy):
                self._drain_suspects(lane, now, effects)

    def drain(self, lane: Lane, now: float, effects: list[Effect]) -> None:
        """Sends waiting vertices of a lane while it has an open instance."""
        while (vertex := self._queues.first(lane)) is not None:
            instance = self.pool.least_loaded(lane, avoid=vertex.avoid)
            if instance is None:
                return
            instance, cached, reason = self._choose(vertex, instance)
            self._queues.take_out(vertex)
            self._uncount_waiting(vertex)
            effects.append(self._send(vertex, instance, cached, reason, now))

    def _choose(self, vertex: Vertex, least: Instance) -> tuple[Instance, int, str]:
        """The instance of a vertex, the prompt tokens that it holds, and why it is that one."""
        if vertex.avoid is not None:
            same = vertex.avoid == least.instance_id
            return least, 0, "retry_same" if same else "retry_elsewhere"
        ready = vertex.ready
        if not ready.prefix_keys:
            return least, 0, "least_loaded"
        holder, held_tokens = self._prefixes.find(ready.policy, ready.prefix_keys)
        if holder is None:
            return least, 0, "least_loaded"
        if holder is least:
            return least, held_tokens, "least_loaded"
        near = holder.load - least.load <= self._config.prefix_margin_tokens
        if near and holder.is_open and self.pool.serves(holder, vertex.lane):
            return holder, held_tokens, "prefix"
        return least, 0, "least_loaded"

    def _send(
        self, vertex: Vertex, instance: Instance, cached: int, reason: str, now: float
    ) -> Send:
        ready = vertex.ready
        vertex.attempt += 1
        vertex.load = max(vertex.load - cached, 1)
        if ready.prefix_keys:
            self._prefixes.add(ready.policy, ready.prefix_keys, instance)
        self._put(vertex, instance, now)
        return Send(
            attempt_id(ready.vertex_id, vertex.attempt),
            ready.vertex_id,
            vertex.attempt,
            instance.instance_id,
            ready.version,
            reason,
            vertex.num_kept,
        )

    def _put(self, vertex: Vertex, instance: Instance, now: float) -> None:
        vertex.instance = instance
        self.book(vertex.ready.policy).count_running(1, vertex.load, now)
        instance.running[vertex.ready.vertex_id] = vertex
        instance.load += vertex.load
        self.pool.offer(instance)

    def _expected_tokens(self, vertex: Vertex) -> int:
        ready = vertex.ready
        expected = self._learning.response_tokens(ready.agent, default=ready.max_tokens)
        return ready.num_prompt_tokens + round(max(expected, vertex.num_kept + 1))

    def _drain_suspects(self, lane: Lane, now: float, effects: list[Effect]) -> None:
        """Gives the first suspect of a lane its instance, once that is empty."""
        suspects = self._suspects[lane]
        while suspects:
            vertex = suspects[0]
            own = [instance for instance in self.pool if instance.reserved is vertex]
            instance = own[0] if own else self.pool.least_busy(lane)
            if instance is None:
                return
            if not own:
                instance.reserved = vertex
                self.pool.touch(instance)
            if instance.running or not instance.usable:
                return
            suspects.popleft()
            vertex.waiting = False
            vertex.alone = True
            self._uncount_waiting(vertex)
            effects.append(self._send(vertex, instance, 0, "suspect_alone", now))
        del self._suspects[lane]

    def _uncount_waiting(self, vertex: Vertex) -> None:
        book = self.book(vertex.ready.policy)
        book.num_waiting -= 1
        book.waiting_tokens -= vertex.load

    def _is_suspect(self, vertex: Vertex) -> bool:
        return vertex.deaths >= self._config.suspect_deaths

    # Instances.

    def change(self, instance: Instance, event: InstanceChanged) -> None:
        """Takes over what an instance is now; it is offered where it may be used."""
        if instance.policies != event.policies or instance.capacity != event.capacity:
            self._count_places(instance.policies, -1, -instance.capacity)
            self._count_places(event.policies, 1, event.capacity)
        if instance.policies != event.policies:
            instance.vacating = False
        if instance.weights_hash != event.weights_hash:
            instance.epoch += 1
        instance.policies = event.policies
        instance.capacity = event.capacity
        instance.version = event.version
        instance.weights_hash = event.weights_hash
        instance.usable = event.use is InstanceUse.SERVING
        self._release_reserved(instance)
        self.pool.offer(instance)

    def vacate(self, instance: Instance) -> None:
        """An instance takes nothing new until its policies change."""
        instance.vacating = True
        self._release_reserved(instance)
        self.pool.touch(instance)

    def remove(self, instance: Instance) -> None:
        """An instance is lost; whoever calls this takes its vertices off it."""
        self._count_places(instance.policies, -1, -instance.capacity)
        instance.usable = False
        instance.epoch += 1
        self._release_reserved(instance)
        self.pool.remove(instance)

    def _count_places(self, policies: Iterable[str], instances: int, places: int) -> None:
        for policy in policies:
            book = self.book(policy)
            book.num_instances += instances
            book.num_places += places

    def _release_reserved(self, instance: Instance) -> None:
        """The instance changes: the suspect that waits for it looks for another one."""
        if instance.reserved is not None and not instance.reserved.alone:
            self._freed_for.add(instance.reserved.ready.policy)
            instance.reserved = None
