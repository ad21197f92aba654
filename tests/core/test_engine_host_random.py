"""An engine host's core under random events: invariants, and replay of the trace."""

from __future__ import annotations

from random import Random
from typing import assert_never

import pytest

from flexmarl.core.engine_host import EngineHost
from flexmarl.core.engine_host_events import (
    Effect,
    EngineEnded,
    EngineHostConfig,
    EngineReadied,
    Event,
    InstancePhase,
    InstanceWanted,
    LoadEnded,
    LoadEngine,
    LoadOrder,
    LoadOrdered,
    PlanReceived,
    Problem,
    ReportInstance,
    SetTimer,
    StartEngine,
    StopEngine,
    TimerFired,
)

CONFIG = EngineHostConfig(start_timeout_s=9, load_timeout_s=5, backoff_max_s=2, stable_s=3)
NAMES = ("p-0", "p-1", "q-0")


class World:
    """Engines that start, load, die and hang at random; every effect is checked against them."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.core = EngineHost(CONFIG)
        self.now = 0.0
        self.trace: list[tuple[Event, float, list[Effect]]] = []
        self.timer: float | None = None
        self.alive: dict[str, int] = {}  # instance: generation of its process
        self.ready: dict[str, None] = {}
        self.loading: dict[str, LoadEngine] = {}
        self.content: dict[str, tuple[int, str]] = {}  # what each engine really holds
        self.newest: dict[str, LoadOrder] = {}
        self.policies: dict[str, str] = {}
        self.plan()

    def post(self, event: Event) -> None:
        effects = self.core.handle(event, self.now)
        self.trace.append((event, self.now, effects))
        for effect in effects:
            self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case StartEngine():
                name = effect.wanted.instance_id
                assert name not in self.alive, "one process per instance"
                self.alive[name] = effect.generation
            case StopEngine():
                if self.alive.get(effect.instance_id) == effect.generation:
                    self.bury(effect.instance_id)
                    self.ended(effect.instance_id, effect.generation)
            case LoadEngine():
                name = effect.instance_id
                assert name in self.ready, "weights go to engines that are there"
                assert name not in self.loading, "one load at a time"
                assert effect.order == self.newest[name], "always the newest order"
                assert effect.fetch == (
                    self.content.get(name, (0, ""))[1] != effect.order.weights_hash
                )
                self.loading[name] = effect
            case ReportInstance():
                self.check_report(effect.instance_id)
            case SetTimer():
                self.timer = effect.at
            case _:
                assert_never(effect)

    def check_report(self, name: str) -> None:
        """I11: what is said to be served is what the engine holds."""
        view = self.core.view(name)
        assert view is not None
        if view.phase is InstancePhase.SERVING:
            assert self.content[name] == (view.version, view.weights_hash)

    def bury(self, name: str) -> None:
        self.alive.pop(name)
        self.ready.pop(name, None)
        self.loading.pop(name, None)
        self.content.pop(name, None)

    def ended(self, name: str, generation: int) -> None:
        problem = Problem("CHILD_DIED", "gone")
        self.post(EngineEnded(instance_id=name, generation=generation, problem=problem))

    def plan(self) -> None:
        wanted = []
        for name in NAMES:
            if self.rng.random() < 0.9:
                self.policies[name] = self.rng.choice("pq")
                wanted.append(self.wanted(name))
        self.post(PlanReceived(run_id="r", term=1, instances=tuple(wanted)))

    def wanted(self, name: str) -> InstanceWanted:
        dtype = self.rng.choice(("float32",) * 9 + ("float64",))
        return InstanceWanted(
            instance_id=name, run_id="r", policies=(self.policies[name],), engine="instant",
            model_path="/m", model_hash="h", max_concurrency=1, dtype=dtype, max_context=0,
        )  # fmt: skip

    def order(self) -> None:
        policy, version = self.rng.choice("pq"), self.rng.randrange(9)
        content = f"h-{policy}-{version // 2}"
        order = LoadOrder(policy=policy, version=version, weights_hash=content, key="k")
        mine = tuple(n for n in self.core.instance_ids() if self.policies[n] == policy)
        for name in mine:
            self.newest[name] = order
        self.post(LoadOrdered(instance_ids=mine, order=order))

    def load_ends(self, name: str) -> None:
        effect = self.loading.pop(name)
        refused = self.rng.random() < 0.2
        if not refused:
            self.content[name] = (effect.order.version, effect.order.weights_hash)
        self.post(
            LoadEnded(
                instance_id=name, generation=effect.generation, load_id=effect.load_id,
                problem=Problem("CHECKSUM_MISMATCH", "other bytes") if refused else None,
            )
        )  # fmt: skip

    def step(self) -> None:
        rng = self.rng
        self.now += rng.random()
        if self.timer is not None and self.timer <= self.now:
            self.timer = None
            self.post(TimerFired())
        kind = rng.randrange(20)
        starting = sorted(set(self.alive) - set(self.ready))
        if kind == 0:
            self.plan()
        elif kind < 5:
            self.order()
        elif kind < 7 and self.alive:
            name = rng.choice(sorted(self.alive))
            generation = self.alive[name]
            self.bury(name)
            self.ended(name, generation)
        elif kind < 12 and starting:
            name = rng.choice(starting)
            self.ready[name] = None
            self.post(EngineReadied(instance_id=name, generation=self.alive[name]))
        elif kind < 18 and self.loading:
            self.load_ends(rng.choice(sorted(self.loading)))
        elif self.alive:  # what an earlier process said arrives late
            name = rng.choice(sorted(self.alive))
            self.post(EngineReadied(instance_id=name, generation=self.alive[name] - 1))
            self.ended(name, self.alive[name] - 1)


@pytest.mark.parametrize("seed", range(8))
def test_invariants_hold_under_random_events_and_the_trace_replays(seed):
    world = World(Random(seed))
    for _ in range(600):
        world.step()
    fresh = EngineHost(CONFIG)
    assert [fresh.handle(event, now) for event, now, _ in world.trace] == [
        effects for _, _, effects in world.trace
    ]
    kinds = {type(effect) for _, _, effects in world.trace for effect in effects}
    assert kinds >= {StartEngine, StopEngine, LoadEngine, ReportInstance, SetTimer}
