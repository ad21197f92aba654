"""Two hosts of one name: which is refused, for how long, and what of it is remembered and told."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from flexmarl.api.rollout.v1 import engine_pb2 as eng
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.dispatcher.host_names import MAX_REPLACED, HostNames
from flexmarl.rollout.dispatcher.hosts import Hosts


class Dialling:
    """The stream of one process; it stays until `leave`."""

    def __init__(self, hosts: Hosts, incarnation: str, *, host_id: str = "h0") -> None:
        self.ended = asyncio.create_task(self._listen(hosts))
        self._hello = eng.HostHello(host_id=host_id, incarnation=incarnation)
        self._left = asyncio.Event()

    async def _listen(self, hosts: Hosts) -> None:
        async for _ in hosts.serve(self._requests()):
            pass

    async def _requests(self):
        yield eng.ConnectEngineHostRequest(hello=self._hello)
        await self._left.wait()

    async def leave(self) -> None:
        self._left.set()
        await self.ended


async def is_refused(hosts: Hosts, incarnation: str) -> bool:
    """Whether a process that dials is refused; if not, it leaves again."""
    dialling = Dialling(hosts, incarnation)
    await turn()
    if not dialling.ended.done():
        await dialling.leave()
        return False
    with pytest.raises(DomainError) as told:
        await dialling.ended
    assert told.value.reason is ErrorReason.ALREADY_EXISTS
    return True


async def turn() -> None:
    """Lets everybody go on until they wait for something that is not there."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until_gone(hosts: Hosts) -> None:
    async with asyncio.timeout(10):
        while hosts._away:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_the_one_that_was_replaced_has_its_name_again_when_the_other_one_is_gone():
    hosts = Hosts(grace_s=0.0)
    first = Dialling(hosts, "first")
    await turn()
    later = Dialling(hosts, "later")
    await first.ended
    assert await is_refused(hosts, "first")
    await later.leave()
    await until_gone(hosts)
    assert not await is_refused(hosts, "first")
    await until_gone(hosts)


async def test_a_name_whose_host_may_come_back_is_kept_for_it():
    hosts = Hosts(grace_s=60.0)
    first = Dialling(hosts, "first")
    await turn()
    later = Dialling(hosts, "later")
    await first.ended
    await later.leave()
    assert await is_refused(hosts, "first")
    for timer in hosts._away.values():
        timer.cancel()


async def test_a_host_that_is_started_again_and_again_leaves_nothing_when_it_is_gone():
    hosts = Hosts(grace_s=0.0)
    diallings = []
    for n in range(5):
        diallings.append(Dialling(hosts, f"n{n}"))
        await turn()
    assert len(hosts._names) == 4
    await diallings[-1].leave()
    await until_gone(hosts)
    assert len(hosts._names) == 0


def refused(names: HostNames, incarnation: str) -> bool:
    try:
        names.check(eng.HostHello(host_id="h0", incarnation=incarnation))
    except DomainError:
        return True
    return False


def test_what_is_remembered_of_a_name_is_bounded_and_whoever_still_dials_stays():
    names = HostNames()
    for n in range(3 * MAX_REPLACED):
        names.replaced("h0", f"n{n}")
        assert refused(names, "n0")
    assert len(names) == MAX_REPLACED
    assert not refused(names, "n1")
    assert refused(names, f"n{3 * MAX_REPLACED - 1}")
    assert len(names) == MAX_REPLACED


def test_a_host_that_is_refused_is_logged_when_that_begins_and_told_what_to_do():
    names = HostNames()
    with capture_logs() as logs:
        for _ in range(2):
            names.replaced("h0", "first")
            for _ in range(3):
                with pytest.raises(DomainError, match="give each its own host_id, or stop one"):
                    names.check(eng.HostHello(host_id="h0", incarnation="first"))
            names.freed("h0")
    assert [(line["event"], line["host"]) for line in logs] == [("host_name_twice", "h0")] * 2
