"""What a host says is taken in pieces, and nothing of it is lost when the run ends meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from flexmarl.api.rollout.v1 import engine_pb2 as eng
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.keepalive import MAX_MESSAGE_BYTES
from flexmarl.rollout.dispatcher.hosts import Hosts

ATTEMPTS = [f"v{n}#1" for n in range(300)]


class Run:
    """Listens to hosts; may end in the middle of what one says."""

    def __init__(self, hosts: Hosts, *, ends_after: int) -> None:
        self.pieces: list[list[str]] = []
        self._hosts = hosts
        self._ends_after = ends_after

    def host_connected(self, session, hello) -> None:
        pass

    def host_away(self, host_id) -> None:
        pass

    def host_results(self, session, results) -> None:
        self.pieces.append([result.attempt_id for result in results])
        if len(self.pieces) == self._ends_after:
            self._hosts.dismiss(eng.InstancePlan(run_id="r"))


async def converse(*, ends_after: int) -> tuple[list[list[str]], list[str]]:
    """What the run is told, and what the host is, of 300 results in one message."""
    hosts = Hosts(grace_s=60.0)
    run = Run(hosts, ends_after=ends_after)
    hosts.listen(run)
    all_taken = asyncio.Event()

    async def requests():
        yield eng.ConnectEngineHostRequest(hello=eng.HostHello(host_id="h0"))
        results = [eng.GenerateResult(attempt_id=attempt) for attempt in ATTEMPTS]
        yield eng.ConnectEngineHostRequest(results=results)
        all_taken.set()  # the next message is asked for once this one was taken
        await asyncio.Event().wait()

    told: list[str] = []

    async def listen() -> None:
        async for message in hosts.serve(requests()):
            told.extend(message.stored)

    async with asyncio.timeout(20):
        listening = asyncio.create_task(listen())
        await all_taken.wait()
        while sum(map(len, run.pieces)) + len(told) < len(ATTEMPTS):  # noqa: ASYNC110
            await asyncio.sleep(0)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    for timer in hosts._away.values():
        timer.cancel()
    return run.pieces, told


async def test_results_are_taken_in_order_and_in_pieces():
    pieces, told = await converse(ends_after=0)
    assert [attempt for piece in pieces for attempt in piece] == ATTEMPTS
    assert len(pieces) > 1
    assert told == []  # whoever has stored them says so


async def test_what_is_left_when_the_run_ends_meanwhile_is_nobodys():
    pieces, told = await converse(ends_after=1)
    assert len(pieces) == 1
    assert [*pieces[0], *told] == ATTEMPTS


async def test_a_host_that_cannot_be_met_is_not_taken_for_connected():
    class Careless(Run):
        def host_connected(self, session, hello) -> None:
            raise KeyError("what it says makes no sense")

    hosts = Hosts(grace_s=60.0)
    hosts.listen(Careless(hosts, ends_after=0))

    async def requests():
        yield eng.ConnectEngineHostRequest(hello=eng.HostHello(host_id="h0"))
        await asyncio.Event().wait()

    with pytest.raises(KeyError):
        async for _ in hosts.serve(requests()):
            pass
    assert hosts.sessions == []
    for timer in hosts._away.values():
        timer.cancel()


@pytest.mark.parametrize(
    "hello",
    [
        eng.HostHello(host_id=""),
        eng.HostHello(host_id="../h"),
        eng.HostHello(host_id="h0", attempt_ids=["no attempt"]),
    ],
)
async def test_a_hello_that_makes_no_sense_is_refused(hello):
    hosts = Hosts(grace_s=60.0)

    async def requests():
        yield eng.ConnectEngineHostRequest(hello=hello)

    with pytest.raises(DomainError) as refused:
        async for _ in hosts.serve(requests()):
            pass
    assert refused.value.reason is ErrorReason.INVALID_ARGUMENT
    assert hosts.sessions == []


async def test_requests_that_are_more_than_a_message_holds_reach_their_host():
    """All that waits is sent when an instance begins to serve; each time the stream broke."""
    hosts = Hosts(grace_s=60.0)
    ends = asyncio.Event()

    async def requests():
        yield eng.ConnectEngineHostRequest(hello=eng.HostHello(host_id="h0"))
        await ends.wait()

    prompt = [1 << 20] * 2_000_000
    stream = hosts.serve(requests())
    await anext(stream)  # its answer to the hello
    session = hosts.session("h0")
    for n in range(9):
        session.outgoing.add().requests.add(attempt_id=f"v{n}#1", prompt_tokens=prompt)
    got = []
    while len(got) < 9:
        message = await anext(stream)
        assert message.ByteSize() < MAX_MESSAGE_BYTES
        got += [request.attempt_id for request in message.requests]
    assert got == [f"v{n}#1" for n in range(9)]
    ends.set()
    assert await anext(stream, None) is None
    for timer in hosts._away.values():
        timer.cancel()
