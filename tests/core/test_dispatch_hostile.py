"""Events in any order, of anything: the dispatcher's books stay whole, and nothing waits for ever.

Nobody in here behaves: results come twice, late, of attempts that were never sent, by instances
that are gone; vertices are asked for again after their end; samples end in the middle.
"""

from __future__ import annotations

from collections import Counter
from math import isfinite
from random import Random

import pytest

from flexmarl.core.dispatch import Dispatcher
from flexmarl.core.dispatch_events import (
    Abort,
    Accept,
    Attach,
    AttemptAborted,
    AttemptFailed,
    AttemptsHeld,
    AttemptSucceeded,
    DispatchConfig,
    Fail,
    HeldAttempt,
    InstanceChanged,
    InstanceUse,
    InstanceVacating,
    SampleEnded,
    Send,
    SetTimer,
    TimerFired,
    Vacated,
    VertexCancelled,
    VertexDetached,
    VertexReady,
    WeightsKnown,
    attempt_id,
)
from flexmarl.core.errors import ErrorReason
from flexmarl.core.vertex_timers import Due

CONFIG = DispatchConfig(handover_s=0.5, suspect_deaths=1, poison_deaths=2, retry_max_s=0.4)
POLICIES = ("p", "q")
SAMPLES = ("s0", "s1", "s2")
INSTANCES = ("i0", "i1", "i2", "i3")


class Hostile:
    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.core = Dispatcher(CONFIG, Random(seed))
        self.now = 0.0
        self.timer: float | None = None
        self.seen: Counter[type] = Counter()

    def post(self, event) -> None:
        for effect in self.core.handle(event, self.now):
            self.seen[type(effect)] += 1
            if isinstance(effect, SetTimer):
                self.timer = effect.at
            elif isinstance(effect, Send):
                self.check_send(effect)
        self.check()

    def check_send(self, send: Send) -> None:
        vertex = self.core._vertices.get(send.vertex_id)
        if vertex is None:
            return  # it was sent and cut in one event
        instance = self.core._pool.get(send.instance_id)
        assert instance is not None, "no attempt goes to an instance that is gone"
        assert send.attempt == vertex.attempt
        assert vertex.ready.policy in instance.policies
        assert send.version == vertex.ready.version == instance.version

    # What must hold whenever nothing happens.

    def check(self) -> None:
        vertices = list(self.core._vertices.values())
        for vertex in vertices:
            self.check_vertex(vertex)
        for policy in POLICIES:
            self.check_policy(policy, [v for v in vertices if v.ready.policy == policy])
        for instance in self.core._pool:
            running = list(instance.running.values())
            assert instance.load == sum(vertex.load for vertex in running) >= 0
            assert all(vertex.instance is instance for vertex in running)
            assert all(vertex in vertices for vertex in running)
            if instance.reserved is not None:
                assert instance.reserved in vertices
        self.check_suspects()
        self.check_timer(vertices)
        self.check_learning()

    def check_suspects(self) -> None:
        """The first one of a lane has an instance for itself as soon as one is empty."""
        for lane, suspects in self.core._assignment._suspects.items():
            own = [i for i in self.core._pool if suspects and i.reserved is suspects[0]]
            able = self.core._pool.least_busy(lane)
            assert not (suspects and not own and able is not None)
            assert not any(instance.usable and not instance.running for instance in own)

    def check_vertex(self, vertex) -> None:
        """It is in one place, and something will come for it."""
        in_place = vertex.instance is not None
        retries = any(
            entry[2] is vertex and entry[3] is Due.RETRY and entry[4] == vertex.attempt
            for entry in self.core._timers._heap
        )
        assert in_place + vertex.waiting == 1 or (retries and not in_place)
        if in_place:
            attempt = attempt_id(vertex.ready.vertex_id, vertex.attempt)
            assert attempt in self.core.attempts_at([vertex.instance.instance_id])
            assert self.core.is_wanted(attempt)
        elif vertex.waiting and not self.core._assignment._is_suspect(vertex):
            # I2: it waits for capacity alone.
            assert not [
                instance
                for instance in self.core._pool
                if instance.is_open and self.core._pool.serves(instance, vertex.lane)
            ]

    def check_policy(self, policy: str, vertices) -> None:
        book = self.core.book(policy)
        waiting = [vertex for vertex in vertices if vertex.waiting]
        running = [vertex for vertex in vertices if vertex.instance is not None]
        instances = [i for i in self.core._pool if policy in i.policies]
        assert book.num_waiting == len(waiting)
        assert book.waiting_tokens == sum(vertex.load for vertex in waiting)
        assert book.num_running == len(running)
        assert book.running_tokens == sum(vertex.load for vertex in running)
        assert book.num_instances == len(instances)
        assert book.num_places == sum(instance.capacity for instance in instances)
        assert isfinite(book.running_s)
        assert book.running_s >= 0.0

    def check_timer(self, vertices) -> None:
        due = [entry[0] for entry in self.core._timers._heap if entry[2] in vertices]
        if vertices:
            assert self.timer is not None
            assert self.timer <= min(due)
        for vertex in vertices:
            assert any(e[2] is vertex and e[3] is Due.DEADLINE for e in self.core._timers._heap)

    def check_learning(self) -> None:
        learning = self.core.learning
        for policy in POLICIES:
            open_steps = [step for steps in learning._samples.values() for step in steps]
            spent = sum(step[4] + step[5] for step in open_steps if step[2] == policy)
            assert learning._spent.get(policy, 0) == spent
            assert 0.0 <= learning.coming(policy) < 1e12

    # What happens.

    def vertex_id(self) -> str:
        return f"{self.rng.choice(SAMPLES)}/0:{self.rng.randrange(4)}"

    def attempt_id(self) -> str:
        running = self.core.attempts_at(INSTANCES)
        if running and self.rng.random() < 0.7:
            return self.rng.choice(running)
        return attempt_id(self.vertex_id(), self.rng.randrange(5))

    def event(self):
        rng = self.rng
        kind = rng.randrange(18)
        version = rng.choice((0, 0, 0, 0, 0, 1, 2))
        asked = rng.choice((b"x", b"x", b"x", b"y", b""))
        policy, instance = rng.choice(POLICIES), rng.choice(INSTANCES)
        content = rng.choice((f"h{version}",) * 5 + ("other",))
        if kind < 5:
            vertex = self.vertex_id()
            return VertexReady(
                vertex, f"agent-{policy}", policy, version, (0, rng.randrange(3)), rng.randrange(9),
                rng.randrange(1, 9), rng.choice((0.3, 30.0)), rng.randrange(1, 4),
                rng.randrange(1, 9), vertex.partition("/")[0], (self.vertex_id(),),
                tuple(range(rng.randrange(3))), rng.random() < 0.8, asked,
            )  # fmt: skip
        if kind < 8:
            made = rng.randrange(9)
            return AttemptSucceeded(self.attempt_id(), version, content, made, asked)
        if kind == 8:
            return AttemptAborted(self.attempt_id(), version, content, rng.randrange(9), asked)
        if kind == 9:
            reason = rng.choice((ErrorReason.CHILD_DIED, ErrorReason.INTERNAL))
            return AttemptFailed(self.attempt_id(), rng.random() < 0.6, reason, "broke")
        if kind < 12:
            served = rng.choice((("p",), ("q",), ("p", "q")))
            return InstanceChanged(
                instance_id=instance, policies=served, capacity=rng.randrange(4),
                use=rng.choice(list(InstanceUse)), version=version, weights_hash=content,
            )  # fmt: skip
        if kind == 12:
            held = [HeldAttempt(self.attempt_id(), instance, version, asked) for _ in range(2)]
            return AttemptsHeld(tuple(held))
        if kind == 13:
            return WeightsKnown(policy, version, content, rng.choice((0, 0, 0, version)))
        if kind == 14:
            return SampleEnded(rng.choice(SAMPLES), rng.random() < 0.5)
        simple = (VertexCancelled, VertexDetached, InstanceVacating)[kind - 15]
        return simple(instance if simple is InstanceVacating else self.vertex_id())

    def step(self) -> None:
        self.now += self.rng.choice((0.0, 0.01, 0.2))
        if self.timer is not None and self.timer <= self.now:
            self.timer = None
            self.post(TimerFired())
        elif self.rng.random() < 0.02:
            self.post(TimerFired())  # the loop's clock is a hair early
        self.post(self.event())

    def finish(self) -> None:
        """Everything ends by its deadline, and with it what is known of it."""
        for _ in range(100):
            if self.timer is not None and self.core._vertices:
                self.now = max(self.now, self.timer)
                self.timer = None
                self.post(TimerFired())
        assert not self.core._vertices
        for instance in self.core._pool:
            assert (instance.load, instance.running) == (0, {})
        for sample in SAMPLES:
            self.post(SampleEnded(sample, whole=False))
        assert list(self.core._held) == []


@pytest.mark.parametrize("seed", range(15))
def test_the_books_stay_whole_whatever_anybody_says(seed):
    world = Hostile(seed)
    for _ in range(2500):
        world.step()
    world.finish()
    assert min(world.seen[kind] for kind in (Send, Accept, Fail, Abort, Attach, Vacated)) > 0
