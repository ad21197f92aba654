"""What becomes of ready vertices: which go where, when, and what their attempts' ends mean.

Pure: events and `now` come in, effects go out, each with its reason; ties are broken by the seeded
generator that is passed in. A driver that records (now, event) can replay them through a fresh
`Dispatcher` and gets the same effects.

Invariants:
    At most one attempt of a vertex is accepted (I3): a vertex is forgotten when it ends, and what
    arrives later is a duplicate. Each vertex ends: by a success, by one of two bounds on attempts,
    by ending the instances that it had for itself, or by its deadline (I8). An instance that shall
    serve another policy gives its requests back with what they have drawn; tokens are kept only
    if the version's weights drew them, and given up at the first failure after that. A vertex that
    was sent before its dispatcher or its worker died is attached to what hosts hold of it, and not
    sent again. Where ready vertices go is `assignment`'s.

Every event costs O(log n).
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import assert_never

from flexmarl.core.agent_learning import AgentLearning
from flexmarl.core.assignment import Assignment
from flexmarl.core.dispatch_events import (
    Abort,
    Accept,
    Attach,
    AttemptAborted,
    AttemptFailed,
    AttemptsHeld,
    AttemptSucceeded,
    DispatchConfig,
    Duplicate,
    Effect,
    Event,
    Fail,
    HeldAttempt,
    Hold,
    InstanceChanged,
    InstanceUse,
    InstanceVacating,
    Keep,
    Release,
    SampleEnded,
    SetTimer,
    TimerFired,
    Vacated,
    VertexCancelled,
    VertexDetached,
    VertexReady,
    WeightsKnown,
    attempt_id,
    split_attempt_id,
)
from flexmarl.core.dispatch_records import Instance, Lane, PolicyBook, Vertex
from flexmarl.core.errors import ErrorReason
from flexmarl.core.held_attempts import Held, HeldAttempts
from flexmarl.core.ready_queues import urgency
from flexmarl.core.vertex_timers import Due, VertexTimers


class Dispatcher:
    """The dispatcher of one run.

    Attributes:
        learning: What is learnt per agent and policy.
    """

    def __init__(self, config: DispatchConfig, rng: Random) -> None:
        self.learning = AgentLearning(rate=config.learning_rate)
        self._config = config
        self._vertices: dict[str, Vertex] = {}
        self._weights: dict[Lane, str] = {}
        self._assignment = Assignment(config, rng, learning=self.learning, weights=self._weights)
        self._pool = self._assignment.pool
        self._timers = VertexTimers(self._is_current)
        self._held = HeldAttempts()
        self._sequence = 0

    # Reading.

    def book(self, policy: str) -> PolicyBook:
        """Running sums of a policy."""
        return self._assignment.book(policy)

    def num_at(self, instance_id: str) -> int:
        """Vertices at one instance."""
        instance = self._pool.get(instance_id)
        return 0 if instance is None else len(instance.running)

    def load_at(self, instance_id: str) -> int:
        """Outstanding work at one instance, in tokens."""
        instance = self._pool.get(instance_id)
        return 0 if instance is None else instance.load

    def attempts_at(self, instance_ids: Collection[str]) -> list[str]:
        """Attempts at some instances, oldest first; held ones that have not ended included."""
        attempts: list[str] = []
        for name in sorted(instance_ids):
            attempts += self._held.running_at(name)
            if (instance := self._pool.get(name)) is not None:
                running = instance.running.items()
                attempts += [attempt_id(vertex_id, vertex.attempt) for vertex_id, vertex in running]
        return attempts

    def is_wanted(self, attempt: str) -> bool:
        """Whether the attempt is held, or its vertex is known and has not ended."""
        return split_attempt_id(attempt)[0] in self._vertices or attempt in self._held

    def _is_current(self, vertex: Vertex) -> bool:
        return self._vertices.get(vertex.ready.vertex_id) is vertex

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
            case AttemptAborted():
                self._aborted(event, now, effects)
            case InstanceChanged():
                self._changed(event, now, effects)
            case InstanceVacating():
                self._vacating(event, now, effects)
            case WeightsKnown():
                self._weights_known(event, now, effects)
            case VertexCancelled():
                self._cancelled(event, now, effects)
            case VertexDetached():
                self._detached(event, now, effects)
            case AttemptsHeld():
                self._hold(event)
            case SampleEnded():
                self.learning.sample_ended(event.sample_id, whole=event.whole)
                effects.extend(map(_release, self._held.take_sample(event.sample_id)))
            case TimerFired():
                self._fired(now, effects)
            case _:
                assert_never(event)
        return effects

    def _ready(self, event: VertexReady, now: float, effects: list[Effect]) -> None:
        if event.vertex_id in self._vertices:
            return  # a worker that reconnects may say it twice
        self._sequence += 1
        self.learning.called(event.sample_id)
        rank = urgency(
            ready_at=now,
            path_tokens=self.learning.path_tokens(event.agent, default=event.max_tokens),
            ageing_tokens_per_s=self._config.ageing_tokens_per_s,
        )
        vertex = Vertex(event, (*event.group_order, rank, self._sequence))
        self._vertices[event.vertex_id] = vertex
        self._set_timer(now + event.timeout_s, vertex, Due.DEADLINE, effects)
        held = self._held.take(event.vertex_id)
        if held and self._attach(vertex, held, now, effects):
            return
        self._assignment.place(vertex, now, effects)

    # What was sent before a crash.

    def _hold(self, event: AttemptsHeld) -> None:
        for attempt in event.attempts:
            if not self.is_wanted(attempt.attempt_id):
                self._held.add(attempt)

    def _detached(self, event: VertexDetached, now: float, effects: list[Effect]) -> None:
        vertex = self._vertices.get(event.vertex_id)
        if vertex is None:
            return
        ready, instance = vertex.ready, vertex.instance
        if instance is None or vertex.leaving or vertex.num_kept:
            self._cut(vertex, now, effects)  # no attempt of it can be a whole response
        else:
            name = attempt_id(ready.vertex_id, vertex.attempt)
            held = HeldAttempt(name, instance.instance_id, ready.version, ready.input_hash)
            self._end(vertex, now, effects)
            self._held.add(held)
        self._assignment.drain_policy(ready.policy, now, effects)

    def _attach(self, vertex: Vertex, held: list[Held], now: float, effects: list[Effect]) -> bool:
        """Gives a vertex the best attempt that is held of it; False when it must be sent."""
        best, *others = held
        vertex.attempt = max(one.number for one in held)
        vertex.first_valid = best.number
        is_its_own = self._is_its_own(vertex, best)
        if not is_its_own:
            others, vertex.first_valid = held, vertex.attempt + 1
        effects.extend(map(_release, others))
        if not is_its_own:
            return False
        name, instance_id = best.attempt.attempt_id, best.attempt.instance_id
        effects.append(Attach(name, vertex.ready.vertex_id, best.number, instance_id))
        if best.success is not None:
            self._succeeded(best.success, now, effects)
        else:
            instance = self._pool.get(instance_id)
            assert instance is not None, "checked before"
            self._assignment.attach(vertex, instance, now)
        return True

    def _is_its_own(self, vertex: Vertex, held: Held) -> bool:
        """Whether an attempt was asked what the vertex asks, and is, or can become, its success."""
        ready, attempt = vertex.ready, held.attempt
        if (attempt.version, attempt.input_hash) != (ready.version, ready.input_hash):
            return False
        if held.success is not None:
            return self._is_right(vertex, held.success.version, held.success.weights_hash)
        instance = self._pool.get(attempt.instance_id)
        return instance is not None and not instance.vacating and ready.policy in instance.policies

    # Ends of attempts.

    def _succeeded(self, event: AttemptSucceeded, now: float, effects: list[Effect]) -> None:
        vertex_id, attempt = split_attempt_id(event.attempt_id)
        vertex = self._vertices.get(vertex_id)
        held = self._held.get(event.attempt_id) if vertex is None else None
        if held is not None and _answers(event, held.attempt.input_hash):
            held.success = event
            effects.append(Hold(event.attempt_id))
            return
        if vertex is None or not vertex.first_valid <= attempt <= vertex.attempt:
            effects.append(Duplicate(event.attempt_id))
            return
        ready = vertex.ready
        if not _answers(event, ready.input_hash):
            self._failed(_asked_otherwise(event), now, effects)
            return
        if not self._is_right(vertex, event.version, event.weights_hash):
            self._failed(self._mislabelled(event, vertex), now, effects)
            return
        if attempt != vertex.attempt and vertex.instance is not None:
            # An earlier attempt, given up for lost, came first: the first success wins.
            current = attempt_id(vertex_id, vertex.attempt)
            effects.append(Abort(current, vertex.instance.instance_id))
        num_tokens = event.num_tokens + vertex.num_kept
        self._assignment.book(ready.policy).done_tokens += ready.num_prompt_tokens + num_tokens
        self.learning.finished(
            ready.sample_id,
            vertex_id,
            agent=ready.agent,
            policy=ready.policy,
            upstream_ids=ready.upstream_ids,
            num_prompt_tokens=ready.num_prompt_tokens,
            num_tokens=num_tokens,
        )
        self._end(vertex, now, effects)
        effects.append(Accept(event.attempt_id, vertex_id, attempt))
        self._assignment.drain_policy(ready.policy, now, effects)

    def _is_right(self, vertex: Vertex, version: int, weights_hash: str) -> bool:
        """Whether a vertex' tokens were drawn by the weights that it asked for (I4)."""
        ready = vertex.ready
        return version == ready.version and weights_hash == self._weights.get(vertex.lane)

    def _mislabelled(self, event: AttemptSucceeded, vertex: Vertex) -> AttemptFailed:
        return AttemptFailed(
            event.attempt_id,
            infrastructure=True,
            reason=ErrorReason.WEIGHTS_MISMATCH,
            message=f"attempt {event.attempt_id} was served by version {event.version} "
            f"({event.weights_hash}), not {vertex.ready.version} "
            f"({self._weights.get(vertex.lane)})",
        )

    def _failed(self, event: AttemptFailed, now: float, effects: list[Effect]) -> None:
        vertex = self._at_instance(event.attempt_id)
        if vertex is None:
            effects.append(Duplicate(event.attempt_id))
            return
        self._retry(vertex, event, now, effects, delayed=event.infrastructure)
        self._assignment.drain_policy(vertex.ready.policy, now, effects)

    def _aborted(self, event: AttemptAborted, now: float, effects: list[Effect]) -> None:
        vertex = self._at_instance(event.attempt_id)
        if vertex is None:
            effects.append(Duplicate(event.attempt_id))
            return
        if not vertex.leaving:
            failed = AttemptFailed(
                event.attempt_id,
                infrastructure=True,
                reason=ErrorReason.CANCELLED,
                message=f"attempt {event.attempt_id} was aborted by its instance",
            )
            self._failed(failed, now, effects)
            return
        if (
            0 < event.num_tokens < vertex.ready.max_tokens - vertex.num_kept  # some are left
            and vertex.ready.resumable
            and _answers(event, vertex.ready.input_hash)
            and self._is_right(vertex, event.version, event.weights_hash)
        ):
            vertex.num_kept += event.num_tokens
            vertex.first_valid = vertex.attempt + 1
            effects.append(Keep(event.attempt_id, vertex.ready.vertex_id))
        self._give_back(vertex, now, effects)
        self._assignment.drain_policy(vertex.ready.policy, now, effects)

    def _at_instance(self, attempt: str) -> Vertex | None:
        """The vertex whose current attempt this is, while it is at its instance."""
        held = self._held.get(attempt)
        if held is not None and held.success is None:
            self._held.drop(attempt)  # it has ended, and not as somebody's success
        vertex_id, number = split_attempt_id(attempt)
        vertex = self._vertices.get(vertex_id)
        if vertex is None or number != vertex.attempt or vertex.instance is None:
            return None
        return vertex

    def _retry(
        self,
        vertex: Vertex,
        event: AttemptFailed,
        now: float,
        effects: list[Effect],
        *,
        delayed: bool,
    ) -> None:
        assert vertex.instance is not None
        vertex.avoid = vertex.instance.instance_id
        if event.reason == ErrorReason.CHILD_DIED:
            vertex.deaths += 1
            vertex.lonely_deaths += vertex.alone
        vertex.start_over()
        self._leave(vertex, now, effects)
        ready = vertex.ready
        if event.infrastructure:
            vertex.infra_failures += 1
            failures, bound, name = vertex.infra_failures, ready.infra_attempts, "infra_attempts"
        else:
            vertex.request_failures += 1
            failures, bound, name = vertex.request_failures, ready.max_attempts, "max_attempts"
        message = ""
        if failures >= bound:
            message = f"{event.message} (attempt {failures} of {name} = {bound})"
        elif vertex.lonely_deaths >= self._config.poison_deaths:
            message = (
                f"{event.message}; {vertex.deaths} instances died under this request, "
                f"{vertex.lonely_deaths} of which it had for itself: it is what ends them"
            )
        if message:
            effects.append(Fail(ready.vertex_id, vertex.attempt, event.reason, message))
            self._end(vertex, now, effects)
        elif delayed:
            delay_s = self._config.retry_initial_s * 2.0 ** min(failures - 1, 16)
            at = now + min(delay_s, self._config.retry_max_s)
            self._set_timer(at, vertex, Due.RETRY, effects)
        else:
            self._assignment.enqueue(vertex)

    # Instances and weights.

    def _changed(self, event: InstanceChanged, now: float, effects: list[Effect]) -> None:
        instance = self._pool.get(event.instance_id)
        gone = event.use is InstanceUse.GONE
        if gone:
            for attempt in self._held.running_at(event.instance_id):
                self._held.drop(attempt)
        if instance is None:
            if gone:
                return
            instance = self._pool.add(event.instance_id)
        policies = set(event.policies)
        if gone:
            policies |= self._lose(instance, now, effects)
        else:
            self._assignment.change(instance, event)
        for policy in sorted(policies):
            self._assignment.drain_policy(policy, now, effects)

    def _lose(self, instance: Instance, now: float, effects: list[Effect]) -> set[str]:
        """Fails what a lost instance worked on; its vertices go elsewhere at once."""
        policies: set[str] = set()
        self._assignment.remove(instance)
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

    def _vacating(self, event: InstanceVacating, now: float, effects: list[Effect]) -> None:
        instance = self._pool.get(event.instance_id)
        if instance is None or instance.vacating:
            return
        self._assignment.vacate(instance)
        for vertex in instance.running.values():
            vertex.leaving = True
            name = attempt_id(vertex.ready.vertex_id, vertex.attempt)
            effects.append(Abort(name, instance.instance_id))
            self._set_timer(now + self._config.handover_s, vertex, Due.HANDOVER, effects)
        if not instance.running:
            effects.append(Vacated(instance.instance_id))
        for policy in instance.policies:  # a suspect that waited for it waits for another one
            self._assignment.drain_policy(policy, now, effects)

    def _give_back(self, vertex: Vertex, now: float, effects: list[Effect]) -> None:
        """A vertex of a vacating instance goes on elsewhere; that is no failure."""
        self._leave(vertex, now, effects)
        self._assignment.enqueue(vertex)

    def _leave(self, vertex: Vertex, now: float, effects: list[Effect]) -> None:
        instance = vertex.instance
        assert instance is not None
        self._assignment.leave(vertex, now)
        if instance.vacating and not instance.running:
            effects.append(Vacated(instance.instance_id))

    def _weights_known(self, event: WeightsKnown, now: float, effects: list[Effect]) -> None:
        self._weights[(event.policy, event.version)] = event.weights_hash
        for lane in [lane for lane in self._weights if lane[1] < event.forget_below]:
            del self._weights[lane]
            # Vertices of forgotten versions are none of the run's any more, but they still end by
            # their deadline: their queue stays until it is empty.
            self._pool.forget_lane(lane)
        effects.extend(map(_release, self._held.take_below(event.forget_below)))
        for instance in self._pool:
            self._pool.offer(instance)
        self._assignment.drain_policy(event.policy, now, effects)

    # Ends.

    def _cancelled(self, event: VertexCancelled, now: float, effects: list[Effect]) -> None:
        vertex = self._vertices.get(event.vertex_id)
        if vertex is None:
            return
        self._cut(vertex, now, effects)
        self._assignment.drain_policy(vertex.ready.policy, now, effects)

    def _fired(self, now: float, effects: list[Effect]) -> None:
        freed: set[str] = set()
        for vertex, due in self._timers.fired(now):
            if due is Due.DEADLINE:
                failure = _too_late(vertex)
                self._cut(vertex, now, effects)
                effects.append(failure)
            elif due is Due.RETRY:
                self._assignment.enqueue(vertex)
            elif vertex.leaving:
                # Its instance did not give it back in time. Its tokens are lost, no more.
                vertex.start_over()
                self._give_back(vertex, now, effects)
            freed.add(vertex.ready.policy)
        for policy in sorted(freed):
            self._assignment.drain_policy(policy, now, effects)
        self._say_timer(self._timers.rearm(), effects)

    def _cut(self, vertex: Vertex, now: float, effects: list[Effect]) -> None:
        if vertex.instance is not None and not vertex.leaving:
            name = attempt_id(vertex.ready.vertex_id, vertex.attempt)
            effects.append(Abort(name, vertex.instance.instance_id))
        self._end(vertex, now, effects)

    def _end(self, vertex: Vertex, now: float, effects: list[Effect]) -> None:
        """Forgets a vertex, wherever it is."""
        del self._vertices[vertex.ready.vertex_id]
        if vertex.waiting:
            self._assignment.withdraw(vertex)
        if vertex.instance is not None:
            self._leave(vertex, now, effects)

    def _set_timer(self, at: float, vertex: Vertex, due: Due, effects: list[Effect]) -> None:
        num_live = len(self._vertices)
        self._say_timer(self._timers.set(at, vertex, due, num_live=num_live), effects)

    def _say_timer(self, at: float | None, effects: list[Effect]) -> None:
        if at is not None:
            effects.append(SetTimer(at))


def _answers(event: AttemptSucceeded | AttemptAborted, input_hash: bytes) -> bool:
    """Whether an attempt was asked this: attempts before it may have had its name."""
    return not event.input_hash or event.input_hash == input_hash


def _asked_otherwise(event: AttemptSucceeded) -> AttemptFailed:
    message = f"attempt {event.attempt_id} answers what an attempt of its name was asked before"
    return AttemptFailed(event.attempt_id, True, ErrorReason.CANCELLED, message)


def _release(held: Held) -> Release:
    return Release(held.attempt.attempt_id, held.attempt.instance_id)


def _too_late(vertex: Vertex) -> Fail:
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
