"""`flexmarl health`: whether services are ready, as they say it themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from flexmarl.cli.errors import EXIT_FAILED, CliError
from flexmarl.cli.output import print_json, print_table

SERVING: Final = "serving"

_COLUMNS: Final = ("address", "health")


def health(addresses: Sequence[str], *, timeout_s: float, as_json: bool) -> int:
    """Show the readiness of each address; returns 0 when all serve, else 1.

    Raises:
        CliError: An address is none.
    """
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdigit()):
            raise CliError(f"{address!r}: write the address as HOST:PORT")
    states = asyncio.run(health_of(addresses, timeout_s=timeout_s))
    rows = [{"address": a, "health": s} for a, s in zip(addresses, states, strict=True)]
    if as_json:
        print_json(rows)
    else:
        print_table(rows, _COLUMNS)
    return 0 if all(state == SERVING for state in states) else EXIT_FAILED


async def health_of(addresses: Sequence[str], *, timeout_s: float) -> list[str]:
    """What each service says of itself, such as `serving`, or why it says nothing."""
    return list(await asyncio.gather(*(_ask(address, timeout_s) for address in addresses)))


async def _ask(address: str, timeout_s: float) -> str:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from flexmarl.client.channel import connect
    from flexmarl.client.errors import FlexMarlError

    async with connect(address) as channel:
        # The published stubs of this package do not know its methods.
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except FlexMarlError as error:
            return f"no answer ({error.code.name.lower()})"
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name.lower()
