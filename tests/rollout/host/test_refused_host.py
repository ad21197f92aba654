"""A host that a real dispatcher refuses for its name: what it says of it, how often it dials."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

import pytest
from structlog.testing import capture_logs

from flexmarl.api.rollout.v1 import engine_pb2 as pb
from flexmarl.api.rollout.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from flexmarl.rollout.dispatcher.hosts import Hosts
from flexmarl.rollout.dispatcher.rollout import Rollout
from flexmarl.rollout.dispatcher.run import Run
from flexmarl.rollout.dispatcher.service import SERVICE, RolloutServicer
from flexmarl.rollout.host.dispatcher_link import DispatcherLink
from flexmarl.runtime.config import ServerConfig
from flexmarl.runtime.server import GrpcServer


class Hasty(Random):
    """Draws no pause at all, and notes how long each could have been."""

    def __init__(self) -> None:
        super().__init__(0)
        self.longest: list[float] = []

    def uniform(self, a: float, b: float) -> float:
        self.longest.append(b)
        return a


class Linked:
    """A host of which there is nothing but its link."""

    def __init__(self, address: str, incarnation: str) -> None:
        self.connected: list[bool] = []
        self.rng = Hasty()
        self._changed = asyncio.Event()
        hello = pb.HostHello(host_id="h0", incarnation=incarnation)
        link = DispatcherLink(
            address,
            introduce=lambda: pb.ConnectEngineHostRequest(hello=hello),
            outgoing=self._nothing,
            on_message=self._take,
            on_connected=self._on_connected,
            rng=self.rng,
        )
        self._task = asyncio.create_task(link.run())

    async def _nothing(self) -> pb.ConnectEngineHostRequest:
        await asyncio.Event().wait()
        raise AssertionError

    async def _take(self, message: pb.ConnectEngineHostResponse) -> None:
        pass

    def _on_connected(self, connected: bool) -> None:
        if not self.connected or self.connected[-1] != connected:
            self.connected.append(connected)
            self._changed.set()

    async def until(self, connected: list[bool]) -> None:
        while self.connected != connected:
            self._changed.clear()
            await self._changed.wait()

    async def until_dialled(self, times: int) -> None:
        while len(self.rng.longest) < times:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def no_run(*_: object) -> Run:
    raise AssertionError("nobody opens one")


@pytest.fixture
async def dispatcher():
    hosts = Hosts(grace_s=0.0)
    servicer = RolloutServicer(Rollout(no_run), hosts)
    server = GrpcServer(
        ServerConfig(),
        name="rollout",
        add_to_server=[partial(add_RolloutServiceServicer_to_server, servicer)],
        services=[SERVICE],
    )
    await server.start()
    yield server
    servicer.stop()
    await server.stop()


async def test_it_is_told_once_dials_less_and_less_and_is_taken_when_the_other_is_gone(dispatcher):
    with capture_logs() as logs:
        async with asyncio.timeout(30):
            first = Linked(dispatcher.address, "first")
            await first.until([True])
            later = Linked(dispatcher.address, "later")
            await later.until([True])
            await first.until_dialled(8)
            await later.stop()
            await first.until([True, False, True, False, True])
    pauses = first.rng.longest
    await first.stop()
    # It was cut, and dialled as one that has lost its dispatcher; what it was told then is final.
    assert pauses[0] <= 0.1
    assert pauses[1:7] == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    mine = [line for line in logs if line["event"].startswith("dispatcher_")]
    told = [line["error"] for line in mine if line["event"] == "dispatcher_refuses"]
    (message,) = told
    assert "give each its own host_id, or stop one of the two" in message
    # Both at first, the one that was cut when it did not know yet, and in the end.
    assert [line["event"] for line in mine].count("dispatcher_reached") == 4
