"""Status streams begin at once, keep their pace, and end when told."""

import asyncio

from flexmarl.runtime.ticks import interval_s, ticks


def test_an_interval_has_a_default_and_a_lower_bound():
    assert interval_s(0) == 0.5
    assert interval_s(1) == 0.02
    assert interval_s(2000) == 2.0


async def test_ticks_come_until_they_are_ended():
    until = asyncio.Event()
    turns = 0
    async for _ in ticks(0.001, until=until):
        turns += 1
        if turns == 3:
            until.set()
    assert turns == 3


async def test_a_long_interval_is_ended_early():
    until = asyncio.Event()
    async with asyncio.timeout(10):
        async for _ in ticks(3600.0, until=until):
            asyncio.get_running_loop().call_soon(until.set)
