"""Prometheus metrics: a registry per service, cheap call statistics, an HTTP endpoint."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from flexmarl.core.errors import DomainError, ErrorReason

LATENCY_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 30)
"""Upper bounds of the call latency histogram."""


def new_registry() -> CollectorRegistry:
    """A registry of its own: the global one would mix the services of one test process."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)  # memory, CPU, descriptors of the process
    return registry


class MethodStats:
    """Counts of one RPC method. Plain numbers: the event loop is their only writer."""

    __slots__ = ("buckets", "codes", "in_flight", "method", "total_s")

    def __init__(self, method: str) -> None:
        self.method = method
        self.in_flight = 0
        self.total_s = 0.0
        self.codes: dict[str, int] = {}
        self.buckets = [0] * (len(LATENCY_BOUNDS_S) + 1)

    def finished(self, *, code: str, seconds: float) -> None:
        """Count one call that ended with a gRPC status name after so many seconds."""
        self.codes[code] = self.codes.get(code, 0) + 1
        self.total_s += seconds
        self.buckets[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1


class RpcStats(Collector):
    """Statistics of all methods of a server, rendered only when scraped."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._methods: dict[str, MethodStats] = {}

    def method(self, name: str) -> MethodStats:
        """Statistics of a method, made on first use."""
        return self._methods.setdefault(name, MethodStats(name))

    def collect(self) -> Iterator[Metric]:
        """Metric families of all methods; called by the registry."""
        labels = ("service", "method")
        calls = CounterMetricFamily(
            "flexmarl_rpc_finished", "Finished calls.", labels=(*labels, "code")
        )
        running = GaugeMetricFamily("flexmarl_rpc_in_flight", "Running calls.", labels=labels)
        seconds = HistogramMetricFamily("flexmarl_rpc_seconds", "Call latency.", labels=labels)
        for stats in list(self._methods.values()):
            key = (self._service, stats.method)
            for code, count in list(stats.codes.items()):
                calls.add_metric((*key, code), count)
            running.add_metric(key, stats.in_flight)
            seconds.add_metric(key, _cumulative(stats.buckets), stats.total_s)
        yield from (calls, running, seconds)


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    total = 0
    pairs: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, LATENCY_BOUNDS_S), "+Inf"), buckets, strict=True):
        total += count
        pairs.append((bound, total))
    return pairs


class _Measured(Protocol):
    def __call__(self) -> float: ...


class GaugeSource(Collector):
    """Gauges that are read from functions when scraped, so that nothing is counted twice."""

    def __init__(self) -> None:
        self._gauges: dict[str, tuple[str, _Measured]] = {}

    def add(self, name: str, help_text: str, read: _Measured) -> None:
        """Expose `flexmarl_<name>`; `read` runs in the endpoint's thread and must not block."""
        self._gauges[f"flexmarl_{name}"] = (help_text, read)

    def collect(self) -> Iterator[Metric]:
        """One family per gauge; called by the registry."""
        for name, (help_text, read) in list(self._gauges.items()):
            yield GaugeMetricFamily(name, help_text, value=read())


class MetricsEndpoint:
    """HTTP endpoint `/metrics`, served by a daemon thread of its own."""

    def __init__(self, *, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            server, thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise DomainError(
                ErrorReason.PORT_IN_USE,
                f"metrics port {host}:{port} cannot be bound: {error.strerror}",
                {"address": f"{host}:{port}"},
            ) from None
        self._server: WSGIServer = server
        self._thread: threading.Thread = thread

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving and release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
