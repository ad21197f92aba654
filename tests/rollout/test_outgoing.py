"""What goes to a peer at once, and what only with something else, or when it is due."""

from __future__ import annotations

import asyncio

from flexmarl.api.rollout.v1.engine_pb2 import ConnectEngineHostResponse
from flexmarl.rollout.dispatcher.outgoing import Outgoing


def outgoing() -> Outgoing[ConnectEngineHostResponse]:
    return Outgoing(ConnectEngineHostResponse)


async def test_what_nobody_waits_for_goes_with_the_next_message():
    peer = outgoing()
    peer.add_for_later().stored.append("v#1")
    taking = asyncio.create_task(peer.take())
    await asyncio.sleep(0)
    assert not taking.done()
    peer.add().aborts.append("w#1")
    message = await taking
    assert (list(message.stored), list(message.aborts)) == (["v#1"], ["w#1"])


async def test_what_nobody_waits_for_goes_alone_when_it_is_due_and_once():
    peer = outgoing()
    for attempt in ("v#1", "w#1"):
        peer.add_for_later().stored.append(attempt)
    assert list((await peer.take()).stored) == ["v#1", "w#1"]
    taking = asyncio.create_task(peer.take())
    await asyncio.sleep(0)
    assert not taking.done()
    peer.add_for_later().stored.append("x#1")
    assert list((await taking).stored) == ["x#1"]


async def test_closing_ends_who_takes_even_where_something_waits_to_be_due():
    peer = outgoing()
    peer.add_for_later().stored.append("v#1")
    taking = asyncio.create_task(peer.take())
    await asyncio.sleep(0)
    peer.close()
    assert await taking is None
