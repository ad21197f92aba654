"""Hosts, engines, workers and dispatchers come and go at random: every call is answered, once."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext
from random import Random

import pytest
from rollout.fleet_world import FleetWorld
from rollout.virtual_time import run_virtually
from structlog.testing import capture_logs

from flexmarl.core.balance import Move

STEPS = 120
POLICIES = ("p", "q", "r")


class Chaos:
    """Random events over a world; what is broken is mended some time later."""

    def __init__(self, seed: int, *, gently: bool = False) -> None:
        self.gently = gently  # only streams and dispatchers end, one after the other
        self.alone = asyncio.Lock()
        self.rng = rng = Random(seed)
        instances = {name: rng.randint(1, 3) for name in POLICIES}
        rooms = {name: rng.choice((0, 2, 3)) for name in ("a", "b", "c")}
        self.world = FleetWorld(instances, rooms, seed=seed)
        for host in self.world.model_hosts.values():
            host.mean_s = rng.choice((0.3, 1.0, 4.0))
        self.num_asked = 0
        self.tasks: list[asyncio.Task[None]] = []

    def later(self, coroutine) -> None:
        self.tasks.append(asyncio.create_task(coroutine))

    async def run(self) -> None:
        world = self.world
        world.dial()
        await asyncio.sleep(self.rng.random())
        world.open()
        for _ in range(STEPS):
            await asyncio.sleep(self.rng.expovariate(2.0))
            self.step()
        await asyncio.gather(*self.tasks)
        await self.check_quiet()

    def step(self) -> None:
        kinds = [self.ask] * 8 + [self.next_version, self.lose_dispatcher]
        if self.gently:
            kinds += [self.blink, self.blink]
        else:
            kinds += [self.cut, self.lose_worker, self.lose_engine] * 2 + [self.move] * 3
            kinds += [self.break_stream, self.break_stream, self.lose_host, self.refuse]
        self.rng.choice(kinds)()

    def ask(self) -> None:
        for _ in range(self.rng.randint(1, 12)):
            prompt = [self.rng.randrange(97) for _ in range(self.rng.randint(1, 5))]
            self.world.ask(self.num_asked, self.rng.choice(POLICIES), prompt)
            self.num_asked += 1

    def cut(self) -> None:
        if calls := self.world.waiting_calls():
            call = self.rng.choice(calls)
            self.world.desk.cut(call.vertex_id)
            del self.world.asked[call.vertex_id]

    def lose_worker(self) -> None:
        """Its calls are asked for again, by code that does not always do the same."""
        calls = self.world.waiting_calls()
        for call in self.rng.sample(calls, k=min(len(calls), 5)):
            self.world.desk.detach(call.vertex_id)
            self.later(self.ask_again(call, other=self.rng.random() < 0.2))

    async def ask_again(self, call, *, other: bool) -> None:
        world = self.world
        desk = world.desk
        await asyncio.sleep(self.rng.random() * 2)
        if desk is world.desk:
            world.ask_again(call, [*call.prompt_tokens, 1] if other else None)

    def lose_engine(self) -> None:
        host = self.rng.choice(list(self.world.model_hosts.values()))
        if host.engines:
            host.end_engine(self.rng.choice(sorted(host.engines)))

    def break_stream(self) -> None:
        self.later(self.away(self.rng.choice("abc"), anew=False))

    def blink(self) -> None:
        self.later(self.away_for_a_moment())

    async def away_for_a_moment(self) -> None:
        async with self.alone:
            await self.away(self.rng.choice("abc"), anew=False, at_most_s=3.0)
            await asyncio.sleep(0.1)

    def lose_host(self) -> None:
        self.later(self.away(self.rng.choice("abc"), anew=True))

    async def away(self, name: str, *, anew: bool, at_most_s: float = 8.0) -> None:
        host = self.world.model_hosts[name]
        await host.hang_up()
        if anew:
            host.begin_anew()
        await asyncio.sleep(min(self.rng.choice((0.0, 0.5, 3.0, 8.0)), at_most_s))
        self.world.dial(name)

    def refuse(self) -> None:
        for host in self.world.model_hosts.values():
            host.refuse_loads = self.rng.choice((0.0, 0.0, 0.5))

    def move(self) -> None:
        giver, receiver = self.rng.sample(POLICIES, k=2)
        if self.world.mover._vacating:
            return  # one at a time
        self.world.mover._begin(Move(giver, receiver, False, 1.0, 0.1, "chance"), why="chance")

    def next_version(self) -> None:
        """Its weights are there, long before it is committed or not."""
        world = self.world
        if not world.open_calls():
            world.activate()
        else:
            world.announce(world.version + 1)

    def lose_dispatcher(self) -> None:
        self.later(self.dispatcher_anew())

    async def dispatcher_anew(self) -> None:
        async with self.alone if self.gently else nullcontext():
            await self.another_dispatcher()

    async def another_dispatcher(self) -> None:
        world = self.world
        world.restart()
        world.open()
        desk = world.desk
        await world.hang_up()
        for name in self.rng.sample("abc", k=3):
            await asyncio.sleep(self.rng.random() * 0.6)
            world.dial(name)
        await world.hosts.settled()
        for call in world.open_calls():
            if desk is world.desk and call.vertex_id not in world.asked_now:
                world.ask_again(call)

    async def check_quiet(self) -> None:
        """Nothing breaks any more: what was asked is answered, and nobody holds anything."""
        world = self.world
        world.dial()
        for host in world.model_hosts.values():
            host.refuse_loads = 0.0
        for call in world.open_calls():
            if call.vertex_id not in world.asked_now:
                world.ask_again(call)
        for _ in range(300):
            await asyncio.sleep(1.0)
            world.fleet.order_loads()
        assert not world.open_calls()
        world.activate()
        await world.settled()
        await asyncio.sleep(30.0)
        assert all(world.fleet.is_serving(world.version).values())
        running = [name for host in world.model_hosts.values() for name in host.engines]
        room = sum(host.room or 100 for host in world.model_hosts.values())
        assert len(running) == len(set(running)) == min(room, len(world.fleet._assigned))
        for sample_id in world.all_samples:
            world.desk.sample_ended(sample_id, whole=True)
        await asyncio.sleep(60.0)
        for policy in POLICIES:
            book = world.desk.book(policy)
            assert (book.num_waiting, book.waiting_tokens) == (0, 0)
            assert (book.num_running, book.running_tokens) == (0, 0)
        assert (world.desk._calls, world.desk._held, world.desk._writing) == ({}, {}, {})
        assert [len(host.book) for host in world.model_hosts.values()] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_every_call_is_answered_once_whatever_breaks(seed):
    async def run() -> None:
        await Chaos(seed).run()

    with capture_logs() as logs:
        run_virtually(run())
    assert "host_stream_failed" not in {entry["event"] for entry in logs}


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_sampled_twice_while_engines_live(seed):
    async def run() -> None:
        chaos = Chaos(seed, gently=True)
        await chaos.run()
        hosts = chaos.world.model_hosts.values()
        drawn = Counter(attempt.partition("#")[0] for host in hosts for _, attempt in host.drawn)
        assert set(drawn.values()) == {1}

    run_virtually(run())
