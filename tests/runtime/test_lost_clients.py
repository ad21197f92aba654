"""Clients that are there and do nothing any more: a server lets go of what it does for them."""

import asyncio
import os
import signal
import sys

import pytest
from runtime.echo_service import Echo, path, serving

from flexmarl.core import keepalive

CLIENT = """
import asyncio, sys
from flexmarl.client.channel import connect

async def main(address, method):
    async with connect(address) as channel:
        await channel.unary_unary(method)(b"", timeout=600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.timeout(60)
async def test_the_call_of_a_client_that_was_stopped_ends(monkeypatch):
    """Its connection stands, and nothing is sent over it: only a ping finds out.

    Pings are much more frequent than they are; an answer has more time than any client needs.
    """
    monkeypatch.setattr(keepalive, "SERVER_PING_INTERVAL_MS", 500)
    monkeypatch.setattr(keepalive, "SERVER_PING_TIMEOUT_MS", 4_000)
    echo = Echo()
    async with serving(echo) as server:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, server.address, path("Sleep")
        )
        try:
            async with asyncio.timeout(20):
                await echo.entered.wait()
            await asyncio.sleep(6)  # a ping that had no answer would have been found by now
            assert not echo.cleaned.is_set()  # it answers whenever it is asked
            os.kill(client.pid, signal.SIGSTOP)
            async with asyncio.timeout(20):  # gRPC's own timeout is a minute
                await echo.cleaned.wait()
        finally:
            client.kill()
            await client.wait()
