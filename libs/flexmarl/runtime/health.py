"""Health that means readiness: NOT_SERVING until the service says it is ready.

Written here because the stock servicer's watches never end, so that every stop would take the whole
grace period, and because readiness is set from synchronous code.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2

from flexmarl.core.call_context import TIME_METADATA_KEY

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Health:
    """Readiness per service name; the empty name stands for the whole process."""

    def __init__(self, services: Iterable[str]) -> None:
        self._ready: dict[str, bool] = dict.fromkeys(services, False)
        self._changed = asyncio.Event()
        self._closed = False

    def set_ready(self, ready: bool, *, service: str | None = None) -> None:
        """Set one service, or all of them."""
        for name in self._ready if service is None else (service,):
            self._ready[name] = ready
        self._wake()

    def close(self) -> None:
        """Report NOT_SERVING for good and end all watches."""
        self._closed = True
        self.set_ready(False)

    def is_ready(self) -> bool:
        """Whether every service is ready."""
        return all(self._ready.values())

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: ANN401, N802
        """Answer the status now; an unknown service is NOT_FOUND, as the protocol demands.

        The time of this host goes with it, so that hosts can compare their clocks.
        """
        status = self._status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        context.set_trailing_metadata(((TIME_METADATA_KEY, f"{time.time():.6f}"),))
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, _context: Context) -> AsyncIterator[Any]:  # noqa: ANN401, N802
        """Stream the status: waits for a change, freed by `set_ready` and by `close`."""
        last: int | None = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            if self._closed:
                return
            await changed.wait()

    def _status(self, service: str) -> int:
        if service == "":
            return SERVING if self.is_ready() else NOT_SERVING
        ready = self._ready.get(service)
        if ready is None:
            return SERVICE_UNKNOWN
        return SERVING if ready else NOT_SERVING

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
