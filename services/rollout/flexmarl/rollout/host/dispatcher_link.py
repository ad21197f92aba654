"""The long-lived stream to the dispatcher: dialled, introduced, carried, dialled again.

The loop waits for the dispatcher to be reachable (freed by its return), then for messages (freed by
one, or by the end of the stream). Every connection starts with a hello that lists instances and
attempts, and with all results that were not acknowledged: a dispatcher that is new knows what the
host has before it asks for anything.

A host that is refused tries again, less and less often, and tells of it when it begins: the reason
may go away by itself, as when the other host of its name is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final

import grpc

from flexmarl.api.rollout.v1.engine_pb2 import (
    ConnectEngineHostRequest,
    ConnectEngineHostResponse,
)
from flexmarl.api.rollout.v1.rollout_pb2_grpc import RolloutServiceStub
from flexmarl.client.channel import Channel, StreamCall, connect
from flexmarl.client.errors import FlexMarlError
from flexmarl.core.errors import ErrorFamily
from flexmarl.core.retry import Backoff
from flexmarl.runtime.logging import get_logger

_REDIAL: Final = Backoff(initial_s=0.1, max_s=0.5)
_REFUSED_REDIAL: Final = Backoff(initial_s=1.0, max_s=30.0)
_REFUSALS: Final = frozenset(
    (
        ErrorFamily.INVALID,
        ErrorFamily.EXISTS,
        ErrorFamily.NOT_BUILT,
        ErrorFamily.PERMISSION,
        ErrorFamily.UNAUTHENTICATED,
    )
)
"""A dispatcher says so again to the same host, until somebody changes something."""

_CONNECT_TIMEOUT_S: Final = 5.0

_log = get_logger(__name__)


class DispatcherLink:
    """See the module.

    Args:
        address: Of the dispatcher.
        introduce: Makes the hello of a new connection, and resets what goes out after it.
        outgoing: Waits for the next message to send.
        on_message: Takes a message of the dispatcher.
        on_connected: Told at each change.
        rng: Source of the pauses' jitter.
    """

    def __init__(
        self,
        address: str,
        *,
        introduce: Callable[[], ConnectEngineHostRequest],
        outgoing: Callable[[], Awaitable[ConnectEngineHostRequest]],
        on_message: Callable[[ConnectEngineHostResponse], Awaitable[None]],
        on_connected: Callable[[bool], None],
        rng: Random,
    ) -> None:
        self._address = address
        self._introduce = introduce
        self._outgoing = outgoing
        self._on_message = on_message
        self._on_connected = on_connected
        self._rng = rng
        self._refusal = ""  # what it was refused with and has told of

    async def run(self) -> None:
        """Keep the connection until cancelled."""
        failures = 0
        async with connect(self._address) as channel:
            while True:
                started = asyncio.get_running_loop().time()
                redial = _REDIAL
                try:
                    await self._converse(channel)
                except FlexMarlError as error:
                    if error.reason.family in _REFUSALS:
                        redial = _REFUSED_REDIAL
                    self._failed(error)
                if asyncio.get_running_loop().time() - started > _CONNECT_TIMEOUT_S + 1.0:
                    failures = 0  # that was a conversation, not a failed try
                failures += 1
                await asyncio.sleep(redial.delay_s(failures, rng=self._rng))

    def _failed(self, error: FlexMarlError) -> None:
        family = error.reason.family
        if family not in _REFUSALS:
            self._refusal = ""
            log = _log.info if family is ErrorFamily.UNAVAILABLE else _log.error
            log("dispatcher_lost", address=self._address, error=str(error))
        elif str(error) != self._refusal:
            self._refusal = str(error)
            _log.error("dispatcher_refuses", address=self._address, error=self._refusal)

    async def _converse(self, channel: Channel) -> None:
        await channel.wait_ready(timeout_s=_CONNECT_TIMEOUT_S)
        stub: Any = RolloutServiceStub(channel)  # its type knows no calls without an iterator
        call: StreamCall = stub.ConnectEngineHost()
        try:
            await call.write(self._introduce())
            if not self._refusal:  # else it is likely to be refused again, and waits for an answer
                self._reached()
            await _first_end(self._read(call), self._write(call))
        finally:
            self._on_connected(False)
            call.cancel()

    def _reached(self) -> None:
        self._refusal = ""
        _log.info("dispatcher_reached", address=self._address)
        self._on_connected(True)

    async def _read(self, call: StreamCall) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            if self._refusal:
                self._reached()
            await self._on_message(message)

    async def _write(self, call: StreamCall) -> None:
        while True:
            await call.write(await self._outgoing())


async def _first_end(*coroutines: Awaitable[None]) -> None:
    """Run until one ends; cancel the others; raise what the first raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
