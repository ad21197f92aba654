"""The dispatcher under random traffic, moves included: invariants, and replay of the trace."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    Keep,
    Release,
    SampleEnded,
    Send,
    SetTimer,
    TimerFired,
    Vacated,
    VertexCancelled,
    VertexReady,
    WeightsKnown,
    split_attempt_id,
)
from flexmarl.core.errors import ErrorReason

POLICIES = ("p", "q")


class World:
    """Random events over a dispatcher; checks every effect against its own books."""

    def __init__(self, rng: Random, seed: int) -> None:
        self.rng = rng
        self.core = Dispatcher(DispatchConfig(handover_s=0.5), Random(seed))
        self.now = 0.0
        self.trace: list[tuple[object, float, list[object]]] = []
        self.timer: float | None = None
        self.serving: dict[str, tuple[str, int, int]] = {}  # instance: policy, version, capacity
        self.told: dict[str, int] = {}  # capacity, while more of before may still run
        self.vacating: dict[str, None] = {}
        self.vacated: list[str] = []
        self.at: dict[str, str] = {}  # attempt: instance
        self.kept: Counter[str] = Counter()  # vertex: tokens that moved attempts drew
        self.wanted: dict[str, VertexReady] = {}
        self.held: dict[str, None] = {}  # attempts of a dispatcher before
        self.ends: Counter[str] = Counter()
        for policy in POLICIES:
            for version in (0, 1):
                self.post(WeightsKnown(policy, version, f"h{version}"))

    def post(self, event) -> None:
        effects = self.core.handle(event, self.now)
        self.trace.append((event, self.now, effects))
        for effect in effects:
            self.check(effect, event)
        load = Counter(self.at.values())
        for name, (_, _, capacity) in self.serving.items():
            assert load[name] <= capacity
        self.check_books(load)
        while self.vacated:
            self.change_policy(self.vacated.pop())

    def check(self, effect, event) -> None:
        if isinstance(effect, SetTimer):
            assert self.timer is None or effect.at < self.timer
            self.timer = effect.at
        elif isinstance(effect, Send):
            self.check_send(effect)
        elif isinstance(effect, Attach):
            del self.held[effect.attempt_id]
            self.at[effect.attempt_id] = effect.instance_id
            policy, version, capacity = self.serving.get(effect.instance_id, ("", 0, 0))
            if policy:  # the earlier dispatcher filled it: it may be over-full for a while
                room = max(capacity, Counter(self.at.values())[effect.instance_id])
                self.serving[effect.instance_id] = (policy, version, room)
        elif isinstance(effect, Release):
            del self.held[effect.attempt_id]
        elif isinstance(effect, Abort):
            assert self.at[effect.attempt_id] == effect.instance_id
            if effect.instance_id not in self.vacating:
                del self.at[effect.attempt_id]
        elif isinstance(effect, Keep):
            self.kept[effect.vertex_id] += event.num_tokens
        elif isinstance(effect, Vacated):
            assert self.core.num_at(effect.instance_id) == 0
            self.vacated.append(effect.instance_id)
        elif isinstance(effect, (Accept, Fail)):
            self.ends[effect.vertex_id] += 1
            self.forget(effect.vertex_id)

    def check_send(self, send: Send) -> None:
        ready = self.wanted[send.vertex_id]
        policy, version, _ = self.serving[send.instance_id]
        assert (policy, version) == (ready.policy, ready.version) == (policy, send.version)
        assert send.instance_id not in self.vacating
        # One attempt at a time, but for one that its vacated instance did not give back in time.
        self.forget(send.vertex_id)
        if send.num_kept == 0:
            self.kept[send.vertex_id] = 0
        assert send.num_kept == self.kept[send.vertex_id]
        self.at[send.attempt_id] = send.instance_id

    def forget(self, vertex_id: str) -> None:
        self.at = {a: i for a, i in self.at.items() if split_attempt_id(a)[0] != vertex_id}

    def check_books(self, load: Counter[str]) -> None:
        """The running sums say what is there."""
        for policy in POLICIES:
            book = self.core.book(policy)
            running = sum(
                self.wanted[split_attempt_id(a)[0]].policy == policy
                for a in self.core.attempts_at(self.serving)
                if a not in self.held
            )
            assert book.num_running == running
            places = [self.told[name] for name, (p, *_) in self.serving.items() if p == policy]
            assert (book.num_instances, book.num_places) == (len(places), sum(places))
            assert (book.num_waiting > 0) == (book.waiting_tokens > 0)
            assert (book.num_running > 0) == (book.running_tokens > 0)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        while self.timer is not None and self.timer <= self.now:
            self.timer = None
            self.post(TimerFired())

    def step(self, n: int) -> None:
        rng = self.rng
        self.pass_time(rng.random() * 0.02)
        kind = rng.random()
        if kind < 0.35:
            policy = rng.choice(POLICIES)
            ready = VertexReady(
                f"v{n}", f"agent-{policy}", policy, rng.choice((0, 0, 0, 1)), (0, rng.randrange(4)),
                rng.randrange(50), 8, rng.choice((0.3, 50.0)), 3, 9, f"s{n // 9}",
                (f"v{n - 1}",), tuple(range(rng.randrange(3))), rng.random() < 0.8,
            )  # fmt: skip
            self.wanted[ready.vertex_id] = ready
            if rng.random() < 0.1:
                self.hold(ready)
            self.post(ready)
        elif kind < 0.75 and self.at:
            self.end_attempt(rng.choice(sorted(self.at)))
        elif kind < 0.8 and self.wanted:
            vertex_id = rng.choice(sorted(self.wanted))
            if self.core.is_wanted(f"{vertex_id}#1"):
                self.ends[vertex_id] += 1
            self.post(VertexCancelled(vertex_id))
            self.forget(vertex_id)
            self.post(SampleEnded(f"s{rng.randrange(n + 1)}", whole=rng.random() < 0.7))
        elif kind < 0.86 and self.serving:
            name = rng.choice(sorted(self.serving))
            self.vacating[name] = None
            self.post(InstanceVacating(name))
        else:
            self.change_instance()

    def hold(self, ready: VertexReady) -> None:
        """An earlier dispatcher had sent the vertex, which has ended by now or not."""
        rng = self.rng
        attempt = f"{ready.vertex_id}#{rng.randrange(1, 4)}"
        self.held[attempt] = None
        asked = rng.choice((b"", b"", b"other"))
        self.post(
            AttemptsHeld((HeldAttempt(attempt, f"i{rng.randrange(4)}", ready.version, asked),))
        )
        if rng.random() < 0.5:
            self.post(AttemptSucceeded(attempt, ready.version, f"h{ready.version}", 3))

    def end_attempt(self, attempt: str) -> None:
        rng = self.rng
        ready = self.wanted[split_attempt_id(attempt)[0]]
        instance = self.at.pop(attempt)
        if rng.random() < 0.2:
            self.post(
                AttemptFailed(
                    attempt_id=attempt, infrastructure=rng.random() < 0.5,
                    reason=rng.choice((ErrorReason.CHILD_DIED, "R")), message="m",
                )
            )  # fmt: skip
            return
        served = ready.version if rng.random() < 0.95 else 9
        if instance in self.vacating or rng.random() < 0.05:
            self.post(AttemptAborted(attempt, served, f"h{served}", rng.randrange(9)))
            return
        self.post(AttemptSucceeded(attempt, served, f"h{served}", rng.randrange(9)))
        if rng.random() < 0.1:
            self.post(AttemptSucceeded(attempt, ready.version, f"h{ready.version}", 1))

    def change_policy(self, name: str) -> None:
        """The driver's part of a move: the instance serves the other policy."""
        self.vacating.pop(name, None)
        self.at = {a: i for a, i in self.at.items() if i != name}
        policy, version, capacity = self.serving.get(name, ("p", 0, 3))
        self.serve(name, POLICIES[policy == "p"], version, capacity)

    def change_instance(self) -> None:
        rng = self.rng
        name = f"i{rng.randrange(4)}"
        policy = self.serving[name][0] if name in self.serving else POLICIES[int(name[1]) % 2]
        if rng.random() < 0.2:
            self.serving.pop(name, None)
            self.vacating.pop(name, None)
            self.at = {a: i for a, i in self.at.items() if i != name}
            self.post(InstanceChanged(instance_id=name, policies=(policy,), use=InstanceUse.GONE))
            return
        version, capacity = rng.choice((0, 0, 1)), rng.randrange(3, 5)
        self.serve(name, policy, version, capacity)

    def serve(self, name: str, policy: str, version: int, capacity: int) -> None:
        self.serving[name] = (policy, version, max(capacity, Counter(self.at.values())[name]))
        self.told[name] = capacity
        self.post(
            InstanceChanged(
                instance_id=name, policies=(policy,), use=InstanceUse.SERVING, capacity=capacity,
                version=version, weights_hash=f"h{version}",
            )
        )  # fmt: skip

    def finish(self) -> None:
        """Everything ends: by a result or by its deadline, each once (I3, I8)."""
        self.pass_time(1000.0)
        assert set(self.ends) == set(self.wanted)
        assert set(self.ends.values()) <= {1}
        for policy in POLICIES:
            book = self.core.book(policy)
            assert (book.num_waiting, book.waiting_tokens) == (0, 0)
            assert (book.num_running, book.running_tokens) == (0, 0)


def replay(world: World, seed: int) -> list[list[object]]:
    fresh = Dispatcher(DispatchConfig(handover_s=0.5), Random(seed))
    return [fresh.handle(event, now) for event, now, _ in world.trace]


@pytest.mark.parametrize("seed", range(12))
def test_invariants_hold_under_random_traffic_and_its_trace_replays(seed):
    world = World(Random(seed), seed)
    for n in range(1500):
        world.step(n)
    world.finish()
    seen = [effects for _, _, effects in world.trace]
    assert replay(world, seed) == seen
    kinds = Counter(type(effect) for effects in seen for effect in effects)
    wanted = (Send, Accept, Fail, Keep, Vacated, Abort, Attach, Release)
    assert min(kinds[kind] for kind in wanted) > 0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 150))
def test_invariants_hold_whatever_happens(seed, steps):
    world = World(Random(seed), seed)
    for n in range(steps):
        world.step(n)
    world.finish()
    assert replay(world, seed) == [effects for _, _, effects in world.trace]
