"""Probes of addresses: who answers there, how fast, and what time it is at the other end."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flexmarl.cli.preflight.ports import is_free
from flexmarl.client.channel import open_channel
from flexmarl.client.errors import FlexMarlError
from flexmarl.core.call_context import TIME_METADATA_KEY
from flexmarl.core.doctor import Answer, PortState
from flexmarl.core.peer_credentials import PeerCredentials

TIMEOUT_S: Final = 3.0
_NUM_TRIES: Final = 3
"""The fastest of them has the least uncertain clock."""


async def ask(address: str, credentials: PeerCredentials) -> Answer:
    """How a service answers a health check."""
    try:
        channel = open_channel(address, credentials)
    except FlexMarlError as error:
        return Answer(state=PortState.UNREACHABLE, detail=error.message)
    async with channel:
        # The published stubs of this package do not know its methods.
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            first = await _check(stub)
            others = [await _check(stub) for _ in range(_NUM_TRIES - 1)]
        except grpc.aio.AioRpcError as error:
            lines = (error.details() or "").splitlines()
            detail = f"{error.code().name}: {lines[0] if lines else 'no details'}"
            return Answer(state=PortState.UNREACHABLE, detail=detail)
    return min((first, *others), key=lambda answer: answer.round_trip_s)


async def look_at(address: str, credentials: PeerCredentials) -> Answer:
    """What is at an address of this host: nobody, a service, or somebody else."""
    host, _, port = address.rpartition(":")
    if await asyncio.to_thread(is_free, host, int(port)):
        return Answer(state=PortState.FREE)
    answer = await ask(address, credentials)
    if answer.state is not PortState.UNREACHABLE:
        return answer
    return Answer(state=PortState.FOREIGN, detail=answer.detail)


async def _check(stub: Any) -> Answer:  # noqa: ANN401 - see above
    began, began_unix = time.perf_counter(), time.time()
    call = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    response = await call
    round_trip_s = time.perf_counter() - began
    is_serving = response.status == health_pb2.HealthCheckResponse.SERVING
    told = dict(await call.trailing_metadata() or ()).get(TIME_METADATA_KEY)
    return Answer(
        state=PortState.SERVING if is_serving else PortState.NOT_SERVING,
        clock_offset_s=float(told) - (began_unix + round_trip_s / 2) if told else None,
        round_trip_s=round_trip_s,
    )
