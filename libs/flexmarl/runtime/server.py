"""The gRPC server that every service is: locks, health, reflection, metrics, orderly stop."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from flexmarl.core.deadlines import LONG_LIVED
from flexmarl.core.keepalive import server_options
from flexmarl.runtime import own_credentials
from flexmarl.runtime.config import ServerConfig
from flexmarl.runtime.health import Health
from flexmarl.runtime.interceptors import CallInterceptor
from flexmarl.runtime.listen import bind
from flexmarl.runtime.locks import Locks
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.metrics import (
    RPC_METRICS,
    MetricSource,
    MetricSpec,
    Read,
    RpcStats,
    new_registry,
    on_loop,
)
from flexmarl.runtime.metrics_endpoint import MetricsEndpoint

HEALTH_SERVICE = "grpc.health.v1.Health"
_EXEMPT = (
    f"/{HEALTH_SERVICE}/",
    "/grpc.reflection.v1alpha.ServerReflection/",
    "/grpc.reflection.v1.ServerReflection/",
)

AddToServer = Callable[[grpc.aio.Server], None]
DrainHook = Callable[[], Awaitable[None]]

_log = get_logger(__name__)


class ServiceFailedError(RuntimeError):
    """A service stopped because a part of it failed; the cause is its `__cause__`."""


class GrpcServer:
    """One listening process of a service.

    It reports NOT_SERVING until `set_ready(True)`. On SIGTERM or SIGINT: NOT_SERVING, drain hooks
    in the order of their registration, then stop with grace. Use it as::

        server = GrpcServer(config.server, name="meg_store", add_to_server=[...], services=[...])
        await server.start()
        server.set_ready(True)
        await server.serve_until_signal()

    Args:
        config: Address, limits, files.
        name: Service name in metrics and logs.
        add_to_server: Such as `partial(add_XServicer_to_server, servicer)`.
        services: Full names, such as `flexmarl.api.meg_store.v1.MegStoreService`.
        long_lived: Full method names (`/package.Service/Method`) of streams without a
            deadline; by default the project's.
        registry: Where RPC metrics go; a new one by default.

    Attributes:
        stats: Counts and latencies of its calls.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        name: str,
        add_to_server: Sequence[AddToServer],
        services: Sequence[str],
        long_lived: Collection[str] = LONG_LIVED,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.registry = registry or new_registry()
        self._config = config
        self._name = name
        self._add_to_server = tuple(add_to_server)
        self._services = tuple(services)
        self.stats = RpcStats(name)
        self.registry.register(MetricSource(RPC_METRICS, self.stats.readings))
        self._without_deadline = (*long_lived, *_EXEMPT)
        self._health = Health(self._services)
        self._drain_hooks: list[DrainHook] = []
        self._stopping = asyncio.Event()
        self._handles_signals = False
        self._stop_reason = ""
        self._stop_error: BaseException | None = None
        self._server: grpc.aio.Server | None = None
        self._metrics: MetricsEndpoint | None = None
        self._locks = Locks(config)
        self._port = 0

    @property
    def port(self) -> int:
        """The bound port; 0 before `start`."""
        return self._port

    @property
    def address(self) -> str:
        """`host:port` that others reach this server by."""
        return f"{self._config.advertise_host or self._config.host}:{self._port}"

    @property
    def metrics_port(self) -> int | None:
        """Bound port of the metrics endpoint, if there is one."""
        return self._metrics.port if self._metrics else None

    async def start(self) -> int:
        """Bind and listen; health says NOT_SERVING.

        Returns:
            The bound port.

        Raises:
            ConfigError: The address takes locks that are not set, or a file of them is wrong.
            DomainError: PORT_IN_USE.
        """
        locks = Locks.of(self._config)
        interceptor = CallInterceptor(
            stats=self.stats, without_deadline=self._without_deadline, gate=locks.gate
        )
        options = server_options(handshake_timeout_s=self._config.handshake_timeout_s)
        server = grpc.aio.server(interceptors=[interceptor], options=options)
        for add in self._add_to_server:
            add(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._config.reflection:
            names = (*self._services, HEALTH_SERVICE, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        self._port = bind(
            server,
            host=self._config.host,
            port=self._config.port,
            credentials=locks.certificates.credentials() if locks.certificates else None,
        )
        try:
            if self._config.metrics_port is not None:
                self._metrics = MetricsEndpoint(
                    registry=self.registry,
                    host=self._config.host,
                    port=self._config.metrics_port,
                    tls=locks.certificates.context if locks.certificates else None,
                    admits=locks.gate.admits_reader if locks.gate else None,
                )
            await server.start()
        except BaseException:
            await server.stop(None)  # gives the port back
            raise
        self._server, self._locks = server, locks
        _log.info("listening", address=self.address, metrics_port=self.metrics_port)
        locks.tell()
        return self._port

    def set_ready(self, ready: bool, *, service: str | None = None) -> None:
        """Report SERVING or NOT_SERVING for one service name, or for all.

        The address file appears when all are ready and signals are handled: who finds it may
        already send one.
        """
        self._health.set_ready(ready, service=service)
        self._announce()

    def add_metrics(self, specs: Sequence[MetricSpec], read: Read) -> None:
        """Expose the service's own metrics; `read` runs on this event loop at each scrape."""
        self.registry.register(MetricSource(specs, on_loop(read)))

    def on_drain(self, hook: DrainHook) -> None:
        """Run `hook` at stop, before calls are cut; it ends long-lived streams and flushes."""
        self._drain_hooks.append(hook)

    def request_stop(self, reason: str, error: BaseException | None = None) -> None:
        """Stop as on SIGTERM; with an error, `serve_until_signal` fails afterwards."""
        if not self._stopping.is_set():
            _log.info("stopping", reason=reason)
            self._stop_reason, self._stop_error = reason, error
            self._stopping.set()

    def read_again(self) -> None:
        """Take the tokens and certificates that the files hold now: asked for, and shown."""
        self.read_locks_again()
        own_credentials.read_again()

    def read_locks_again(self) -> None:
        """Take those that it lets others in by."""
        self._locks.read_again()
        if self._metrics is not None and self._locks.certificates is not None:
            self._metrics.use_tls(self._locks.certificates.context)

    async def serve_until_signal(self) -> None:
        """Wait for SIGTERM, SIGINT or `request_stop`, then drain and stop.

        Where there are files of locks, or of what it shows to others, SIGHUP has them read again.

        Raises:
            ServiceFailedError: From the error given to `request_stop`. A type of its own, so that a
                failure while running is not taken for a refusal to start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop, signal.Signals(number).name)
        if self._locks.any_set() or own_credentials.has_files():
            loop.add_signal_handler(signal.SIGHUP, self.read_again)
        self._handles_signals = True
        gc.freeze()  # what start-up made stays: collections look at what calls leave behind
        self._announce()
        try:
            await self._stopping.wait()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
            await self.stop()
        if self._stop_error is not None:
            raise ServiceFailedError(self._stop_reason) from self._stop_error

    async def stop(self) -> None:
        """NOT_SERVING, drain hooks, stop with grace; safe to call twice."""
        server, self._server = self._server, None
        if server is None:
            return
        self._health.set_ready(False)
        await self._drain()
        self._health.close()
        await server.stop(self._config.grace_s)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)  # joins the endpoint's thread
        if self._config.address_file is not None:
            self._config.address_file.unlink(missing_ok=True)
        _log.info("stopped")

    def _announce(self) -> None:
        file = self._config.address_file
        if file is not None and self._handles_signals and self._health.is_ready():
            write_json_atomically(file, self._describe())

    async def _drain(self) -> None:
        end = time.monotonic() + self._config.drain_s
        for hook in self._drain_hooks:
            try:
                async with asyncio.timeout(max(end - time.monotonic(), 0.0)):
                    await hook()
            except TimeoutError:
                _log.warning("drain_timed_out", hook=repr(hook), drain_s=self._config.drain_s)
            except Exception:  # noqa: BLE001 - one failed hook must not keep the others from running
                _log.exception("drain_failed", hook=repr(hook))

    def _describe(self) -> dict[str, Any]:
        return {
            "service": self._name,
            "address": self.address,
            "host": self._config.host,
            "port": self._port,
            "metrics_port": self.metrics_port,
            "pid": os.getpid(),
        }


def write_json_atomically(path: Path, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write JSON so that a reader sees the old file, none, or all of the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value) + "\n", encoding="utf-8")
    temporary.replace(path)
