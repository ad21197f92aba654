"""Which ready vertex goes to which instance, when, and what becomes of its attempts.

Pure: events and `now` come in, effects go out, each with its reason; ties are broken by the seeded
generator that is passed in. A driver that records (now, event) can replay them through a fresh
`Dispatcher` and gets the same effects.

Invariants:
    A ready vertex waits only for capacity of its own policy (I2): queues are per policy and
    version, the oldest group first. It is sent only to an instance that serves its version with
    the weights that the version names (I4, I11). At most one attempt of a vertex is accepted (I3):
    a vertex is forgotten when it ends, and what arrives later is a duplicate. Each vertex ends: by
    a success, by one of two bounds on attempts, or by its deadline (I8).

Every event costs O(log n): the least loaded instance is the top of a heap whose outdated entries
are dropped when met, and which is rebuilt when outdated entries prevail.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import heapify, heappop, heappush
from random import Random
from typing import assert_never

from flexmarl.core.dispatch_events import (
    Abort,
    Accept,
    AttemptFailed,
    AttemptSucceeded,
    DispatchConfig,
    Duplicate,
    Effect,
    Event,
    Fail,
    InstanceChanged,
    InstanceUse,
    Send,
    SetTimer,
    TimerFired,
    VertexCancelled,
    VertexReady,
    WeightsKnown,
    attempt_id,
    split_attempt_id,
)
from flexmarl.core.errors import ErrorReason

_Lane = tuple[str, int]  # policy, version
_KEEP_STALE = 64  # outdated heap entries that are not worth a rebuild


class _Vertex:
    """A vertex between VertexReady and its end."""

    __slots__ = (
        "attempt",
        "avoid",
        "infra_failures",
        "instance",
        "load",
        "order",
        "ready",
        "request_failures",
        "waiting",
    )

    def __init__(self, ready: VertexReady, order: tuple[int, int, int]) -> None:
        self.ready = ready
        self.order = order
        self.attempt = 0
        self.request_failures = 0
        self.infra_failures = 0
        self.instance: _Instance | None = None
        self.load = 0
        self.avoid: str | None = None
        self.waiting = False


class _Instance:
    """An instance and what it works on."""

    __slots__ = (
        "capacity",
        "instance_id",
        "load",
        "policies",
        "running",
        "stamp",
        "usable",
        "version",
        "weights_hash",
    )

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.policies: tuple[str, ...] = ()
        self.capacity = 0
        self.version = 0
        self.weights_hash = ""
        self.usable = False
        self.load = 0
        self.stamp = 0
        self.running: dict[str, _Vertex] = {}


class Dispatcher:
    """The dispatcher of one run."""

    def __init__(self, config: DispatchConfig, rng: Random) -> None:
        self._config = config
        self._rng = rng
        self._vertices: dict[str, _Vertex] = {}
        self._instances: dict[str, _Instance] = {}
        self._weights: dict[_Lane, str] = {}
        self._queues: dict[_Lane, list[tuple[tuple[int, int, int], str]]] = {}
        self._free: dict[_Lane, list[tuple[int, float, str, int]]] = {}
        self._num_waiting: dict[_Lane, int] = {}
        self._timers: list[tuple[float, int, str, bool]] = []
        self._timer_at: float | None = None
        self._sequence = 0
        self._expected_tokens: dict[str, float] = {}

    # Reading.

    def num_waiting(self, policy: str) -> int:
        """Ready vertices of a policy that wait for an instance."""
        return sum(count for (name, _), count in self._num_waiting.items() if name == policy)

    def num_running(self, policy: str) -> int:
        """Vertices of a policy at instances."""
        return sum(
            sum(vertex.ready.policy == policy for vertex in instance.running.values())
            for instance in self._instances.values()
        )

    def num_at(self, instance_id: str) -> int:
        """Vertices at one instance."""
        instance = self._instances.get(instance_id)
        return 0 if instance is None else len(instance.running)

    def attempts_at(self, instance_ids: Collection[str]) -> list[str]:
        """Attempts at some instances, oldest first."""
        return [
            attempt_id(vertex_id, vertex.attempt)
            for name in sorted(instance_ids)
            if (instance := self._instances.get(name)) is not None
            for vertex_id, vertex in instance.running.items()
        ]

    def is_live(self, vertex_id: str) -> bool:
        """Whether the vertex is known and has not ended."""
        return vertex_id in self._vertices

    # Deciding.

    def handle(self, event: Event, now: float) -> list[Effect]:
        """The effects of one event at `now` (seconds of any clock that does not go back)."""
        effects: list[Effect] = []
        match event:
            case VertexReady():
                self._ready(event, now, effects)
            case AttemptSucceeded():
                self._succeeded(event, now, effects)
            case AttemptFailed():
                self._failed(event, now, effects)
            case InstanceChanged():
                self._changed(event, now, effects)
            case WeightsKnown():
                self._weights_known(event, effects)
            case VertexCancelled():
                self._cancelled(event, effects)
            case TimerFired():
                self._fired(now, effects)
            case _:
                assert_never(event)
        return effects

    def _ready(self, event: VertexReady, now: float, effects: list[Effect]) -> None:
        if event.vertex_id in self._vertices:
            return  # a worker that reconnects may say it twice
        self._sequence += 1
        vertex = _Vertex(event, (*event.group_order, self._sequence))
        self._vertices[event.vertex_id] = vertex
        self._set_timer(now + event.timeout_s, event.vertex_id, effects, is_deadline=True)
        self._enqueue(vertex)
        self._drain((event.policy, event.version), effects)

    def _succeeded(self, event: AttemptSucceeded, now: float, effects: list[Effect]) -> None:
        vertex_id, attempt = split_attempt_id(event.attempt_id)
        vertex = self._vertices.get(vertex_id)
        if vertex is None or attempt > vertex.attempt:
            effects.append(Duplicate(event.attempt_id))
            return
        ready = vertex.ready
        expected = self._weights.get((ready.policy, ready.version))
        if event.version != ready.version or event.weights_hash != expected:
            message = (
                f"attempt {event.attempt_id} was served by version {event.version} "
                f"({event.weights_hash}), not {ready.version} ({expected})"
            )
            failed = AttemptFailed(
                event.attempt_id,
                infrastructure=True,
                reason=ErrorReason.WEIGHTS_MISMATCH,
                message=message,
            )
            self._failed(failed, now, effects)
            return
        if attempt != vertex.attempt and vertex.instance is not None:
            # An earlier attempt, given up for lost, came first: the first success wins.
            current = attempt_id(vertex_id, vertex.attempt)
            effects.append(Abort(current, vertex.instance.instance_id))
        self._learn(ready.agent, event.num_tokens)
        self._end(vertex)
        effects.append(Accept(event.attempt_id, vertex_id, attempt))
        self._drain_policy(ready.policy, effects)

    def _failed(self, event: AttemptFailed, now: float, effects: list[Effect]) -> None:
        vertex_id, attempt = split_attempt_id(event.attempt_id)
        vertex = self._vertices.get(vertex_id)
        if vertex is None or attempt != vertex.attempt or vertex.instance is None:
            effects.append(Duplicate(event.attempt_id))
            return
        self._retry(vertex, event, now, effects, delayed=event.infrastructure)
        self._drain_policy(vertex.ready.policy, effects)

    def _retry(
        self,
        vertex: _Vertex,
        event: AttemptFailed,
        now: float,
        effects: list[Effect],
        *,
        delayed: bool,
    ) -> None:
        assert vertex.instance is not None
        vertex.avoid = vertex.instance.instance_id
        self._leave(vertex)
        ready = vertex.ready
        if event.infrastructure:
            vertex.infra_failures += 1
            failures, bound, name = vertex.infra_failures, ready.infra_attempts, "infra_attempts"
        else:
            vertex.request_failures += 1
            failures, bound, name = vertex.request_failures, ready.max_attempts, "max_attempts"
        if failures >= bound:
            message = f"{event.message} (attempt {failures} of {name} = {bound})"
            effects.append(Fail(ready.vertex_id, vertex.attempt, event.reason, message))
            self._end(vertex)
        elif delayed:
            delay_s = self._config.retry_initial_s * 2.0 ** min(failures - 1, 16)
            at = now + min(delay_s, self._config.retry_max_s)
            self._set_timer(at, ready.vertex_id, effects, is_deadline=False)
        else:
            self._enqueue(vertex)

    def _changed(self, event: InstanceChanged, now: float, effects: list[Effect]) -> None:
        instance = self._instances.get(event.instance_id)
        if instance is None:
            if event.use is InstanceUse.GONE:
                return
            instance = self._instances[event.instance_id] = _Instance(event.instance_id)
        self._touch(instance)
        instance.policies = event.policies
        instance.capacity = event.capacity
        instance.version = event.version
        instance.weights_hash = event.weights_hash
        instance.usable = event.use is InstanceUse.SERVING
        policies = set(event.policies)
        if event.use is InstanceUse.GONE:
            del self._instances[event.instance_id]
            policies |= self._lose(instance, now, effects)
        self._offer(instance)
        for policy in sorted(policies):
            self._drain_policy(policy, effects)

    def _lose(self, instance: _Instance, now: float, effects: list[Effect]) -> set[str]:
        """Fails what a lost instance worked on; its vertices go elsewhere at once."""
        policies: set[str] = set()
        for vertex in list(instance.running.values()):
            policies.add(vertex.ready.policy)
            failed = AttemptFailed(
                attempt_id(vertex.ready.vertex_id, vertex.attempt),
                infrastructure=True,
                reason=ErrorReason.CHILD_DIED,
                message=f"instance {instance.instance_id} was lost",
            )
            self._retry(vertex, failed, now, effects, delayed=False)
        return policies

    def _weights_known(self, event: WeightsKnown, effects: list[Effect]) -> None:
        self._weights[(event.policy, event.version)] = event.weights_hash
        for lane in [lane for lane in self._weights if lane[1] < event.forget_below]:
            del self._weights[lane]
            # Vertices of forgotten versions are none of the run's any more, but they still end by
            # their deadline: their queue stays until it is empty.
            self._free.pop(lane, None)
        for instance in self._instances.values():
            self._offer(instance)
        self._drain((event.policy, event.version), effects)

    def _cancelled(self, event: VertexCancelled, effects: list[Effect]) -> None:
        vertex = self._vertices.get(event.vertex_id)
        if vertex is None:
            return
        self._cut(vertex, effects)
        self._drain_policy(vertex.ready.policy, effects)

    def _fired(self, now: float, effects: list[Effect]) -> None:
        self._timer_at = None
        freed: set[str] = set()
        while self._timers and self._timers[0][0] <= now:
            _, _, vertex_id, is_deadline = heappop(self._timers)
            vertex = self._vertices.get(vertex_id)
            if vertex is None:
                continue
            if is_deadline:
                failure = self._too_late(vertex)
                self._cut(vertex, effects)
                effects.append(failure)
            else:
                self._enqueue(vertex)
            freed.add(vertex.ready.policy)
        for policy in sorted(freed):
            self._drain_policy(policy, effects)
        self._arm(effects)

    def _too_late(self, vertex: _Vertex) -> Fail:
        ready = vertex.ready
        where = "waiting for an instance"
        if vertex.instance is not None:
            where = f"at instance {vertex.instance.instance_id}"
        elif not vertex.waiting:
            where = "waiting to try again"
        message = (
            f"agent {ready.agent!r}: no answer within timeout_s = {ready.timeout_s:g}; "
            f"{where} of policy {ready.policy!r} at version {ready.version}"
        )
        return Fail(ready.vertex_id, vertex.attempt, ErrorReason.DEADLINE_EXCEEDED, message)

    # Queues.

    def _enqueue(self, vertex: _Vertex) -> None:
        lane = (vertex.ready.policy, vertex.ready.version)
        queue = self._queues.setdefault(lane, [])
        heappush(queue, (vertex.order, vertex.ready.vertex_id))
        vertex.waiting = True
        self._num_waiting[lane] = self._num_waiting.get(lane, 0) + 1

    def _dequeue(self, vertex: _Vertex) -> None:
        """Takes a vertex out of its queue; the heap entry is dropped when met."""
        lane = (vertex.ready.policy, vertex.ready.version)
        vertex.waiting = False
        left = self._num_waiting[lane] - 1
        self._num_waiting[lane] = left
        queue = self._queues[lane]
        if len(queue) > 2 * left + _KEEP_STALE:
            queue[:] = [entry for entry in queue if self._is_waiting(entry[1])]
            heapify(queue)
        if left == 0:
            del self._num_waiting[lane]
            del self._queues[lane]

    def _is_waiting(self, vertex_id: str) -> bool:
        vertex = self._vertices.get(vertex_id)
        return vertex is not None and vertex.waiting

    def _drain_policy(self, policy: str, effects: list[Effect]) -> None:
        lanes: Iterable[_Lane] = [lane for lane in self._queues if lane[0] == policy]
        for lane in sorted(lanes):
            self._drain(lane, effects)

    def _drain(self, lane: _Lane, effects: list[Effect]) -> None:
        """Sends waiting vertices, oldest group first, while the policy has a free instance."""
        while (queue := self._queues.get(lane)) is not None:
            vertex_id = queue[0][1]
            if not self._is_waiting(vertex_id):
                heappop(queue)
                continue
            vertex = self._vertices[vertex_id]
            instance = self._least_loaded(lane, avoid=vertex.avoid)
            if instance is None:
                return
            heappop(queue)
            self._dequeue(vertex)
            effects.append(self._send(vertex, instance))

    def _send(self, vertex: _Vertex, instance: _Instance) -> Send:
        ready = vertex.ready
        if vertex.avoid is None:
            reason = "least_loaded"
        elif vertex.avoid == instance.instance_id:
            reason = "retry_same"
        else:
            reason = "retry_elsewhere"
        vertex.attempt += 1
        vertex.instance = instance
        expected = self._expected_tokens.get(ready.agent, ready.max_tokens)
        vertex.load = ready.num_prompt_tokens + round(expected)
        instance.running[ready.vertex_id] = vertex
        instance.load += vertex.load
        self._touch(instance)
        self._offer(instance)
        return Send(
            attempt_id(ready.vertex_id, vertex.attempt),
            ready.vertex_id,
            vertex.attempt,
            instance.instance_id,
            ready.version,
            reason,
        )

    # Instances.

    def _touch(self, instance: _Instance) -> None:
        """Outdates the heap entries of an instance, also those of an earlier one of its name."""
        self._sequence += 1
        instance.stamp = self._sequence

    def _offer(self, instance: _Instance) -> None:
        """Makes the instance findable where it may take one more request now."""
        if not instance.usable or len(instance.running) >= instance.capacity:
            return
        for policy in instance.policies:
            lane = (policy, instance.version)
            if self._weights.get(lane) != instance.weights_hash:
                continue
            heap = self._free.setdefault(lane, [])
            if len(heap) > 2 * len(self._instances) + _KEEP_STALE:
                heap[:] = [entry for entry in heap if self._entry_instance(entry) is not None]
                heapify(heap)
            tie = self._rng.random()
            heappush(heap, (instance.load, tie, instance.instance_id, instance.stamp))

    def _entry_instance(self, entry: tuple[int, float, str, int]) -> _Instance | None:
        """The instance of a heap entry, when nothing changed since it was pushed."""
        instance = self._instances.get(entry[2])
        return instance if instance is not None and instance.stamp == entry[3] else None

    def _least_loaded(self, lane: _Lane, *, avoid: str | None) -> _Instance | None:
        """Takes the least loaded free instance, another one than `avoid` where there is one."""
        heap = self._free.get(lane, [])
        avoided: tuple[int, float, str, int] | None = None
        while heap:
            entry = heappop(heap)
            instance = self._entry_instance(entry)
            if instance is None:
                continue
            if instance.instance_id != avoid:
                if avoided is not None:
                    heappush(heap, avoided)
                return instance
            avoided = entry
        return None if avoided is None else self._instances[avoided[2]]

    def _leave(self, vertex: _Vertex) -> None:
        """Takes a vertex off its instance, which is offered again."""
        instance = vertex.instance
        assert instance is not None
        vertex.instance = None
        del instance.running[vertex.ready.vertex_id]
        instance.load -= vertex.load
        self._touch(instance)
        self._offer(instance)

    def _cut(self, vertex: _Vertex, effects: list[Effect]) -> None:
        if vertex.instance is not None:
            name = attempt_id(vertex.ready.vertex_id, vertex.attempt)
            effects.append(Abort(name, vertex.instance.instance_id))
        self._end(vertex)

    def _end(self, vertex: _Vertex) -> None:
        """Forgets a vertex, wherever it is."""
        del self._vertices[vertex.ready.vertex_id]
        if vertex.waiting:
            self._dequeue(vertex)
        if vertex.instance is not None:
            self._leave(vertex)

    def _learn(self, agent: str, num_tokens: int) -> None:
        known = self._expected_tokens.get(agent, float(num_tokens))
        self._expected_tokens[agent] = known + self._config.learning_rate * (num_tokens - known)

    # Timers.

    def _set_timer(
        self, at: float, vertex_id: str, effects: list[Effect], *, is_deadline: bool
    ) -> None:
        """Remembers when a vertex must have ended, or when to try it again."""
        if len(self._timers) > 3 * len(self._vertices) + _KEEP_STALE:
            self._timers[:] = [entry for entry in self._timers if entry[2] in self._vertices]
            heapify(self._timers)
        self._sequence += 1
        heappush(self._timers, (at, self._sequence, vertex_id, is_deadline))
        self._arm(effects)

    def _arm(self, effects: list[Effect]) -> None:
        """One timer is set at the driver: the earliest."""
        if not self._timers:
            return
        at = self._timers[0][0]
        if self._timer_at is None or at < self._timer_at:
            self._timer_at = at
            effects.append(SetTimer(at))
