"""What samples go through, with the store's answers held back at will."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from rollout.flow_world import OPEN, FlowWorld, spec
from rollout.virtual_time import run_virtually

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.dispatcher.rows import open_sample

ENDS = (
    common_pb2.SAMPLE_STATUS_DONE,
    common_pb2.SAMPLE_STATUS_FAILED,
    common_pb2.SAMPLE_STATUS_SUPERSEDED,
)


async def test_a_sample_that_is_cut_while_it_waits_for_a_place_ends_once():
    world = FlowWorld(max_samples=1)
    first, second, third = (spec(n) for n in range(3))
    world.flow.start([first, second, third])
    world.stores()
    world.take(first.sample_id)
    cancelling = asyncio.create_task(world.flow.cancel([second.sample_id]))
    await asyncio.sleep(0)
    held, world.held = world.held, []  # its end is on the way
    world.end(first.sample_id)
    world.stores()  # a place is free, while the cut sample's end is not stored yet
    world.held += held
    world.stores()
    await cancelling
    assert world.rows[second.sample_id].status == common_pb2.SAMPLE_STATUS_CANCELLED
    assert world.flow.open_versions() == {0: 1}
    world.take(third.sample_id)
    world.end(third.sample_id)
    world.stores()
    assert (len(world.flow), world.num_done) == (0, 1)


def test_the_time_of_a_sample_counts_from_when_a_worker_took_it() -> None:
    """Its worker is ended when it is late: not for the time that it waited for room there."""

    async def wait_and_run() -> None:
        loop = asyncio.get_running_loop()
        world = FlowWorld()
        world.flow.start([spec(0)])
        world.stores()
        (sample,) = world.flow
        for waited_s in (5000.0, 7000.0):
            await asyncio.sleep(waited_s)
            world.take(sample.spec.sample_id)
            assert sample.started_at == loop.time()
            world.die()
            await asyncio.sleep(1.0)  # what is stored of it is read

    run_virtually(wait_and_run())


async def test_a_run_that_is_closed_reads_nothing_more_of_its_samples():
    """Its store's connection is closed with it: a read that came to it would end the service."""
    world = FlowWorld()
    reading, waiting, left_open = (spec(n) for n in range(3))
    world.rows = {one.sample_id: open_sample(one) for one in (reading, waiting, left_open)}
    hosts_are_back, read = asyncio.Event(), []

    async def graph(sample_id: str) -> None:
        read.append(sample_id)
        raise DomainError(ErrorReason.CANCELLED, "the connection was closed on this side")

    world.flow._settled = hosts_are_back.wait
    world.graph = world.find_graph = graph
    world.flow.start([reading])
    world.stores()  # it was open before: what is stored of it is read, once hosts are back
    world.flow.start([waiting])
    cutting = asyncio.create_task(world.flow.cancel([left_open.sample_id]))
    await asyncio.sleep(0)
    world.flow.close()
    world.stores()
    hosts_are_back.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not read
    assert not world.flow._reads
    cutting.cancel()


async def test_what_cannot_be_read_of_a_sample_ends_the_run_by_name():
    """It did so by ending the service, which would meet it again."""
    world = FlowWorld()
    told: list[Failure] = []
    world.rows = {spec(0).sample_id: open_sample(spec(0))}

    async def graph(sample_id: str) -> None:
        raise DomainError(ErrorReason.INTERNAL, "a block is corrupt")

    world.run_failed = told.append
    world.graph = graph
    world.flow.start([spec(0)])
    world.stores()
    await asyncio.wait(world.flow._reads, timeout=10)
    (failure,) = told
    assert failure.reason == ErrorReason.INTERNAL
    assert spec(0).sample_id in failure.message and "a block is corrupt" in failure.message


class Traffic:
    """Random events over a flow; a dispatcher may be another one, over the same rows."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.limits = rng.choice(((None, None), (1, None), (None, 1), (2, 2)))
        self.world = FlowWorld(max_queries=self.limits[0], max_samples=self.limits[1])
        self.specs = [spec(n, group=group) for group in range(3) for n in range(4)]
        self.started: dict[str, None] = {}
        self.cut: set[str] = set()
        self.cancelling: list[asyncio.Task[None]] = []

    async def step(self) -> None:
        kinds = [self.start, self.start, self.take, self.take, self.take, self.end, self.end]
        kinds += [self.cancel, self.die, self.store, self.store, self.store, self.restart]
        self.rng.choice(kinds)()
        await asyncio.sleep(0)
        self.check()

    def check(self) -> None:
        flow = self.world.flow
        assert sum(flow.open_versions().values()) == len(flow)

    def start(self) -> None:
        some = self.rng.sample(self.specs, k=self.rng.randint(1, 4))
        self.started |= dict.fromkeys(one.sample_id for one in some)
        self.world.flow.start(some)

    def take(self) -> None:
        if self.world.waiting:
            name = self.rng.choice(sorted(self.world.waiting))
            self.world.take(name, self.rng.randrange(2))

    def end(self) -> None:
        if self.world.running:
            name = self.rng.choice(sorted(self.world.running))
            self.world.end(name, self.rng.choice(ENDS))

    def cancel(self) -> None:
        names = [one.sample_id for one in self.rng.sample(self.specs, k=2)]
        self.cut.update(names)
        cancelling = asyncio.create_task(self.world.flow.cancel(names))
        self.cancelling.append(cancelling)

    def die(self) -> None:
        self.world.die(self.rng.randrange(2))

    def store(self) -> None:
        """The store answers some of what it was asked, in order."""
        held = self.world.held
        answered = [held.pop(0) for _ in range(self.rng.randint(0, len(held)))]
        for answer in answered:
            answer()

    def restart(self) -> None:
        if self.rng.random() < 0.2:
            self.world.restart(*self.limits)
            for cancelling in self.cancelling:
                cancelling.cancel()
            self.cancelling.clear()

    async def finish(self) -> None:
        world = self.world
        world.flow.start([one for one in self.specs if one.sample_id in self.started])
        for _ in range(100):
            world.stores()
            for name in list(world.waiting):
                world.take(name)
            for name in list(world.running):
                world.end(name)
            await asyncio.sleep(0)
        assert len(world.flow) == 0
        assert not world.flow.open_versions()
        async with asyncio.timeout(30):
            await asyncio.gather(*self.cancelling)
        assert {name for name, row in world.rows.items() if row.status != OPEN} == set(world.rows)
        assert set(world.rows) | self.cut >= set(self.started)


@pytest.mark.parametrize("seed", range(40))
async def test_every_sample_ends_once_and_open_ones_are_counted(seed):
    traffic = Traffic(seed)
    for _ in range(300):
        await traffic.step()
    await traffic.finish()
