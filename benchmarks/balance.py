"""The cost of looking at the queues and of deciding a move: 1,000 instances, 50 policies.

The state is a real dispatcher's, with requests at every instance and a queue for every policy; no
two looks find the same queues.
"""

from __future__ import annotations

import time
from random import Random
from statistics import median

from benchmarks.report import Report
from flexmarl.core.balance import BalanceConfig, Balancer
from flexmarl.core.balance_monitor import Monitor, MoveCosts
from flexmarl.core.dispatch import Dispatcher
from flexmarl.core.dispatch_events import (
    AttemptSucceeded,
    DispatchConfig,
    Effect,
    InstanceChanged,
    InstanceUse,
    SampleEnded,
    Send,
    VertexReady,
    WeightsKnown,
)

NUM_INSTANCES = 1000
NUM_POLICIES = 50
NUM_SAMPLES = 1000
LOOKS = 2000
_SCALE = 1e6


def run(report: Report) -> None:
    """Measures `balance.monitor_us` and `balance.decide_us`."""
    world = _World(Random(0))
    monitor = Monitor(
        {policy: f"base{n % 5}" for n, policy in enumerate(world.policies)},
        book=world.core.book,
        costs=MoveCosts(),
    )
    balancer = Balancer(BalanceConfig(confirm=1, residence_s=0.0))
    observe_s, decide_s, moves = [], [], 0
    for _ in range(LOOKS):
        world.step()
        t0 = time.perf_counter()
        loads = monitor.observe(world.now)
        coming = world.core.learning.coming
        t1 = time.perf_counter()
        move = balancer.decide(loads, world.now, coming=coming)
        t2 = time.perf_counter()
        observe_s.append(t1 - t0)
        decide_s.append(t2 - t1)
        moves += move is not None
    size = f"{NUM_INSTANCES:,} instances, {NUM_POLICIES} policies"
    report.figure(
        "balance.monitor_us", median(observe_s) * _SCALE, "us", against=size, bound="<= 50"
    )
    report.figure("balance.decide_us", median(decide_s) * _SCALE, "us", against=size, bound="<= 20")
    report.note(f"balance: {moves} of {LOOKS} looks decided a move; a bare loop over the policies "
                f"takes {_floor_us():.1f} us")  # fmt: skip


class _World:
    """Traffic of a large cluster, in virtual time."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.core = Dispatcher(DispatchConfig(), Random(1))
        self.policies = [f"p{n:02}" for n in range(NUM_POLICIES)]
        self.running: list[str] = []
        self.made = 0
        self.ended = 0
        for policy in self.policies:
            self.core.handle(WeightsKnown(policy, 0, "h"), 0.0)
        for n in range(NUM_INSTANCES):
            policy = self.policies[n % NUM_POLICIES]
            self.core.handle(
                InstanceChanged(
                    instance_id=f"i{n}", policies=(policy,), use=InstanceUse.SERVING, capacity=2,
                    version=0, weights_hash="h",
                ),
                0.0,
            )  # fmt: skip
        for _ in range(3 * NUM_INSTANCES):
            self.call()

    def call(self) -> None:
        """One more call; a few policies get most of them."""
        self.made += 1
        policy = self.policies[int(NUM_POLICIES * self.rng.random() ** 3)]
        sample = f"s{self.ended + self.made % NUM_SAMPLES}"
        vertex = VertexReady(
            f"v{self.made}", policy, policy, 0, (0, 0), 100, 50, 1e9, 3, 3, sample
        )  # fmt: skip
        self.note(self.core.handle(vertex, self.now))

    def note(self, effects: list[Effect]) -> None:
        """Remembers what runs."""
        self.running += [effect.attempt_id for effect in effects if isinstance(effect, Send)]

    def step(self) -> None:
        """A few calls end and as many come; a sample ends and another one begins."""
        self.now += 0.1
        self.core.handle(SampleEnded(f"s{self.ended}", whole=True), self.now)
        self.ended += 1
        for _ in range(5):
            attempt = self.running.pop(self.rng.randrange(len(self.running)))
            self.note(self.core.handle(AttemptSucceeded(attempt, 0, "h", 50), self.now))
            self.call()


def _floor_us() -> float:
    items = list(range(NUM_POLICIES))
    started = time.perf_counter()
    for _ in range(LOOKS):
        for _ in items:
            pass
    return (time.perf_counter() - started) / LOOKS * _SCALE
