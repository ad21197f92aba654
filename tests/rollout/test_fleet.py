"""Instances stay where they run, whatever becomes of the connections to their hosts."""

from __future__ import annotations

import asyncio

from rollout.fleet_world import RUN, FleetWorld
from rollout.virtual_time import run_virtually

from flexmarl.api.rollout.v1 import engine_pb2 as eng
from flexmarl.rollout.dispatcher.hosts import HostSession


def test_one_host_back_before_the_other_keeps_its_instance():
    async def run() -> None:
        world = FleetWorld({"p": 1, "r": 1}, {"a": 1, "b": 1})
        world.dial()
        await asyncio.sleep(0.1)
        world.open()
        await world.settled()
        (with_p,) = [h for h in world.model_hosts.values() if h.starts == ["p-0"]]
        (with_r,) = [h for h in world.model_hosts.values() if h.starts == ["r-0"]]
        await world.hang_up()
        world.dial(with_r.host_id)
        await asyncio.sleep(1)
        world.dial(with_p.host_id)
        await world.settled()
        assert (with_p.starts, with_r.starts) == (["p-0"], ["r-0"])

    run_virtually(run())


def test_a_new_dispatcher_finds_every_instance_where_it_runs_whoever_dials_first():
    async def run() -> None:
        world = FleetWorld({"p": 2, "r": 2}, {"a": 0, "b": 0})
        world.dial()
        await asyncio.sleep(0.1)
        world.open()
        await world.settled()
        before = {host.host_id: list(host.starts) for host in world.model_hosts.values()}
        await world.hang_up()
        world.restart()
        world.open()
        world.dial("a")
        await asyncio.sleep(0.5)
        world.dial("b")
        await world.settled()
        await asyncio.sleep(5)
        assert {host.host_id: host.starts for host in world.model_hosts.values()} == before

    run_virtually(run())


def test_after_a_restart_a_lost_host_is_made_up_for_by_another():
    async def run() -> None:
        world = FleetWorld({"p": 1, "r": 1}, {"a": 0, "b": 0})
        world.dial()
        await asyncio.sleep(0.1)
        world.open()
        await world.settled()
        await world.hang_up()
        world.restart()
        world.dial()
        await asyncio.sleep(0.1)
        world.open()
        await world.settled()
        await asyncio.sleep(5)
        await world.hang_up("b")
        await asyncio.sleep(6)  # longer than it is waited for
        await world.settled()
        assert world.model_hosts["a"].starts == ["p-0", "r-0"]

    run_virtually(run())


async def opened(instances: dict[str, int], rooms: dict[str, int]) -> FleetWorld:
    """A world whose instances serve."""
    world = FleetWorld(instances, rooms)
    world.dial()
    await asyncio.sleep(0.1)
    world.open()
    await world.settled()
    await asyncio.sleep(5)
    return world


def test_what_is_sent_as_a_host_comes_back_is_not_taken_for_lost():
    async def run() -> None:
        world = await opened({"p": 1}, {"a": 0})
        await world.hang_up("a")
        for n in range(20):
            world.ask(n, "p", [n])
        await asyncio.sleep(1)
        world.dial("a")
        await asyncio.sleep(60)
        assert not world.open_calls()
        assert world.desk.counters["retries"] == 0
        assert len(world.model_hosts["a"].drawn) == 20

    run_virtually(run())


def test_a_load_that_was_ordered_as_the_stream_broke_is_ordered_again_at_once():
    async def run() -> None:
        world = await opened({"p": 1}, {"a": 0})
        world.activate()
        await world.hang_up("a")
        world.dial("a")
        await world.settled(timeout_s=3)

    run_virtually(run())


def test_a_death_is_counted_as_one_and_as_no_refusal():
    async def run() -> None:
        world = await opened({"p": 1}, {"a": 0})
        world.model_hosts["a"].end_engine("p-0")
        await asyncio.sleep(1)
        await world.hang_up("a")
        world.dial("a")
        await world.settled()
        counters = world.desk.counters
        assert (counters["instance_deaths"], counters["weights_refused"]) == (1, 0)

    run_virtually(run())


def test_every_refusal_is_counted_once():
    async def run() -> None:
        world = await opened({"p": 1}, {"a": 0})
        host = world.model_hosts["a"]
        host.refuse_loads = 1.0
        world.activate()
        for _ in range(45):
            await asyncio.sleep(0.1)
            world.fleet.order_loads()
        host.refuse_loads = 0.0
        await world.settled()
        assert world.desk.counters["weights_refused"] == host.num_refused > 1

    run_virtually(run())


def test_instances_of_which_a_host_says_next_to_nothing_are_ignored():
    async def run() -> None:
        world = FleetWorld({"p": 1}, {"a": 0})
        hello = eng.HostHello(host_id="b", run_id=RUN)
        hello.instances.add(instance_id="p-0")
        world.hosts._connect(HostSession(hello))
        world.dial()
        await asyncio.sleep(0.1)
        world.open()
        await world.settled()

    run_virtually(run())
