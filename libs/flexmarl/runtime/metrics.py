"""Prometheus metrics: a registry per service, running sums read at the scrape.

A service declares its metrics as `MetricSpec`s in one module of its own and hands them to
`GrpcServer.add_metrics` with a function that reads them. Nothing is counted twice and nothing
undeclared can be exposed: what the services keep anyway is read when Prometheus asks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

LATENCY_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 30)
"""Upper bounds of the latency histograms."""

READ_TIMEOUT_S: Final = 5.0
"""Longest that a scrape waits for the event loop; then it goes without what was to be read."""


class MetricKind(StrEnum):
    """What a metric's values do."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram's value: observations up to each bound, cumulative, and their sum."""

    buckets: Sequence[tuple[str, float]]
    total: float


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: a stable name, what it means and in which unit, and its labels.

    Attributes:
        name: As exposed; a counter's ends in `_total`.
        kind: What its values do.
        text: Meaning and unit.
        labels: Names of its labels.
    """

    name: str
    kind: MetricKind
    text: str
    labels: tuple[str, ...] = ()

    def read(self, value: float | Distribution, *labels: str) -> Reading:
        """A value now, under values of all labels."""
        assert len(labels) == len(self.labels), f"{self.name} has the labels {self.labels}"
        return Reading(self, value, labels)


@dataclass(frozen=True, slots=True)
class Reading:
    """A metric's value under some labels."""

    spec: MetricSpec
    value: float | Distribution
    labels: tuple[str, ...]


def gauge(name: str, text: str, *labels: str) -> MetricSpec:
    """A value that goes up and down."""
    return MetricSpec(name, MetricKind.GAUGE, text, labels)


def counter(name: str, text: str, *labels: str) -> MetricSpec:
    """A sum since the service started; its name ends in `_total`."""
    return MetricSpec(name, MetricKind.COUNTER, text, labels)


def histogram(name: str, text: str, *labels: str) -> MetricSpec:
    """A distribution of observations."""
    return MetricSpec(name, MetricKind.HISTOGRAM, text, labels)


RPC_FINISHED: Final = counter(
    "flexmarl_rpc_finished_total", "Finished calls, by gRPC status.", "service", "method", "code"
)
RPC_IN_FLIGHT: Final = gauge("flexmarl_rpc_in_flight", "Running calls.", "service", "method")
RPC_SECONDS: Final = histogram(
    "flexmarl_rpc_seconds", "Seconds of finished calls, in the service.", "service", "method"
)
RPC_METRICS: Final = (RPC_FINISHED, RPC_IN_FLIGHT, RPC_SECONDS)
"""What every service exposes of its calls."""


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


class RpcStats:
    """Statistics of all methods of a server, rendered only when scraped."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._methods: dict[str, MethodStats] = {}

    def method(self, name: str) -> MethodStats:
        """Statistics of a method, made on first use."""
        return self._methods.setdefault(name, MethodStats(name))

    def latency(self, methods: Iterable[str]) -> Distribution:
        """Latency of some methods together."""
        buckets, total_s = [0] * (len(LATENCY_BOUNDS_S) + 1), 0.0
        for name in methods:
            stats = self._methods.get(name)
            if stats is not None:
                buckets = [a + b for a, b in zip(buckets, stats.buckets, strict=True)]
                total_s += stats.total_s
        return Distribution(_cumulative(buckets), total_s)

    def readings(self) -> Iterator[Reading]:
        """All methods' numbers; safe from any thread."""
        for stats in list(self._methods.values()):
            key = (self._service, stats.method)
            for code, count in list(stats.codes.items()):
                yield RPC_FINISHED.read(count, *key, code)
            yield RPC_IN_FLIGHT.read(stats.in_flight, *key)
            latency = Distribution(_cumulative(stats.buckets), stats.total_s)
            yield RPC_SECONDS.read(latency, *key)


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    total = 0
    pairs: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, LATENCY_BOUNDS_S), "+Inf"), buckets, strict=True):
        total += count
        pairs.append((bound, total))
    return pairs


Read = Callable[[], Iterable[Reading]]


class MetricSource(Collector):
    """Declared metrics, read when scraped.

    Args:
        specs: The metrics; each is exposed with its meaning, also while it has no value.
        read: Their values now; runs in the endpoint's thread, see `on_loop`.
    """

    def __init__(self, specs: Sequence[MetricSpec], read: Read) -> None:
        self._specs = tuple(specs)
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One family per metric; called by the registry."""
        families = {spec.name: _family(spec) for spec in self._specs}
        for reading in self._read():
            family, value = families[reading.spec.name], reading.value
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(value, Distribution), "a histogram reads a distribution"
                family.add_metric(reading.labels, value.buckets, value.total)
            else:
                assert not isinstance(value, Distribution), "a distribution is a histogram's"
                family.add_metric(reading.labels, value)
        yield from families.values()


_Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
_FAMILIES: Final[dict[MetricKind, type[_Family]]] = {
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}


def _family(spec: MetricSpec) -> _Family:
    return _FAMILIES[spec.kind](spec.name, spec.text, labels=spec.labels)


def on_loop(read: Read) -> Read:
    """A reading of what belongs to the running event loop, for other threads.

    The scrape's thread waits at most `READ_TIMEOUT_S`; a loop that is stuck or stopped has no
    values, and the metrics of its calls are there nevertheless.
    """
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    async def listed() -> list[Reading]:
        return list(read())

    def read_there() -> Iterable[Reading]:
        if threading.get_ident() == thread:
            return list(read())
        if loop.is_closed():
            return ()
        future = asyncio.run_coroutine_threadsafe(listed(), loop)
        try:
            return future.result(timeout=READ_TIMEOUT_S)
        except (TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            return ()

    return read_there
