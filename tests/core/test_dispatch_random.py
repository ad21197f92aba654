"""The dispatcher under random traffic: invariants, replay, speed of its data structures."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from flexmarl.core.dispatch import Dispatcher
from flexmarl.core.dispatch_events import (
    Abort,
    Accept,
    AttemptFailed,
    AttemptSucceeded,
    DispatchConfig,
    Fail,
    InstanceChanged,
    InstanceUse,
    Send,
    SetTimer,
    TimerFired,
    VertexCancelled,
    VertexReady,
    WeightsKnown,
    split_attempt_id,
)

POLICIES = ("p", "q")


class World:
    """Random events over a dispatcher; checks every effect against its own books."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.core = Dispatcher(DispatchConfig(), Random(seed))
        self.now = 0.0
        self.trace: list[tuple[object, float, list[object]]] = []
        self.timer: float | None = None
        self.serving: dict[str, tuple[str, int, int]] = {}  # instance: policy, version, capacity
        self.at: dict[str, str] = {}  # attempt: instance
        self.wanted: dict[str, VertexReady] = {}
        self.ends: Counter[str] = Counter()

    def post(self, event) -> None:
        effects = self.core.handle(event, self.now)
        self.trace.append((event, self.now, effects))
        for effect in effects:
            self.check(effect)
        load = Counter(self.at.values())
        for name, (_, _, capacity) in self.serving.items():
            assert load[name] <= capacity

    def check(self, effect) -> None:
        if isinstance(effect, SetTimer):
            assert self.timer is None or effect.at < self.timer
            self.timer = effect.at
        elif isinstance(effect, Send):
            ready = self.wanted[effect.vertex_id]
            policy, version, _ = self.serving[effect.instance_id]
            assert (policy, version) == (ready.policy, ready.version) == (policy, effect.version)
            assert not [a for a in self.at if split_attempt_id(a)[0] == effect.vertex_id]
            self.at[effect.attempt_id] = effect.instance_id
        elif isinstance(effect, Abort):
            assert self.at.pop(effect.attempt_id) == effect.instance_id
        elif isinstance(effect, (Accept, Fail)):
            self.ends[effect.vertex_id] += 1
            self.at.pop(f"{effect.vertex_id}#{effect.attempt}", None)

    def step(self, n: int) -> None:
        rng = self.rng
        self.now += rng.random() * 0.02
        while self.timer is not None and self.timer <= self.now:
            self.timer = None
            self.post(TimerFired())
        kind = rng.random()
        if kind < 0.35:
            policy = rng.choice(POLICIES)
            ready = VertexReady(
                f"v{n}", f"agent-{policy}", policy, rng.choice((0, 0, 0, 1)), (0, rng.randrange(4)),
                rng.randrange(50), 8, rng.choice((0.3, 50.0)), 3, 4,
            )  # fmt: skip
            self.wanted[ready.vertex_id] = ready
            self.post(ready)
        elif kind < 0.75 and self.at:
            attempt = rng.choice(sorted(self.at))
            vertex_id, _ = split_attempt_id(attempt)
            ready = self.wanted[vertex_id]
            instance = self.at.pop(attempt)
            if rng.random() < 0.2:
                failed = AttemptFailed(
                    attempt_id=attempt, infrastructure=rng.random() < 0.5, reason="R", message="m"
                )
                self.post(failed)
            else:
                served = ready.version if rng.random() < 0.95 else 9
                self.post(AttemptSucceeded(attempt, served, f"h{served}", rng.randrange(9)))
                if rng.random() < 0.1:
                    self.post(AttemptSucceeded(attempt, ready.version, f"h{ready.version}", 1))
            assert instance
        elif kind < 0.8 and self.wanted:
            vertex_id = rng.choice(sorted(self.wanted))
            if self.core.is_live(vertex_id):
                self.ends[vertex_id] += 1
            self.post(VertexCancelled(vertex_id))
        else:
            self.change_instance()

    def change_instance(self) -> None:
        rng = self.rng
        name = f"i{rng.randrange(4)}"
        policy = POLICIES[int(name[1]) % 2]
        if rng.random() < 0.2:
            self.serving.pop(name, None)
            self.at = {a: i for a, i in self.at.items() if i != name}
            self.post(InstanceChanged(instance_id=name, policies=(policy,), use=InstanceUse.GONE))
            return
        version, capacity = rng.choice((0, 0, 1)), rng.randrange(3, 5)
        self.serving[name] = (policy, version, max(capacity, Counter(self.at.values())[name]))
        self.post(
            InstanceChanged(
                instance_id=name,
                policies=(policy,),
                use=InstanceUse.SERVING,
                capacity=capacity,
                version=version,
                weights_hash=f"h{version}",
            )
        )


@pytest.mark.parametrize("seed", range(12))
def test_invariants_hold_under_random_traffic_and_its_trace_replays(seed):
    world = World(seed)
    for policy in POLICIES:
        for version in (0, 1):
            world.post(WeightsKnown(policy, version, f"h{version}"))
    for n in range(1500):
        world.step(n)
    # Everything ends: by a result or by its deadline, each once (I3, I8).
    world.now += 1000.0
    while world.timer is not None and world.timer <= world.now:
        world.timer = None
        world.post(TimerFired())
    assert set(world.ends) == set(world.wanted)
    assert set(world.ends.values()) == {1}
    fresh = Dispatcher(DispatchConfig(), Random(seed))
    assert [fresh.handle(event, now) for event, now, _ in world.trace] == [
        effects for _, _, effects in world.trace
    ]
    assert any(isinstance(e, Accept) for _, _, effects in world.trace for e in effects)
    assert any(isinstance(e, Fail) for _, _, effects in world.trace for e in effects)
