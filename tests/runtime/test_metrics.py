"""Metrics are declared once and read when scraped."""

from __future__ import annotations

import asyncio
import threading

import pytest
from prometheus_client import generate_latest

from flexmarl.runtime import metrics
from flexmarl.runtime.metrics import (
    RPC_METRICS,
    MetricSource,
    RpcStats,
    counter,
    gauge,
    new_registry,
    on_loop,
)

QUEUED = gauge("flexmarl_queued", "Waiting items.", "kind")
SENT = counter("flexmarl_sent_total", "Items sent.")


def test_values_are_read_at_the_scrape():
    registry, queue = new_registry(), [1, 2]
    registry.register(MetricSource([QUEUED, SENT], lambda: [QUEUED.read(len(queue), "row")]))
    assert b'flexmarl_queued{kind="row"} 2.0' in generate_latest(registry)
    queue.append(3)
    text = generate_latest(registry)
    assert b'flexmarl_queued{kind="row"} 3.0' in text
    assert b"# TYPE flexmarl_sent_total counter" in text  # declared, though it has no value yet


def test_a_reading_has_a_value_for_each_label():
    with pytest.raises(AssertionError, match="kind"):
        QUEUED.read(1)


def test_what_was_not_declared_is_not_exposed():
    with pytest.raises(KeyError, match="flexmarl_sent_total"):
        list(MetricSource([QUEUED], lambda: [SENT.read(1)]).collect())


def text_of(stats: RpcStats) -> str:
    registry = new_registry()
    registry.register(MetricSource(RPC_METRICS, stats.readings))
    return generate_latest(registry).decode()


def test_latencies_fall_into_cumulative_buckets():
    stats = RpcStats("store")
    method = stats.method("/p.S/M")
    for seconds in (0.0004, 0.001, 0.02, 100.0):
        method.finished(code="OK", seconds=seconds)
    counts = {
        line.split('le="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in text_of(stats).splitlines()
        if line.startswith("flexmarl_rpc_seconds_bucket")
    }
    assert (counts["0.0005"], counts["0.001"], counts["0.025"]) == (1.0, 2.0, 3.0)
    assert (counts["30"], counts["+Inf"]) == (3.0, 4.0)


def test_methods_add_up_to_one_latency():
    stats = RpcStats("store")
    for name, seconds in (("/s/A", 0.002), ("/s/B", 0.2), ("/s/C", 9.0)):
        stats.method(name).finished(code="OK", seconds=seconds)
    latency = stats.latency(["/s/A", "/s/B", "/s/not called"])
    assert dict(latency.buckets)["+Inf"] == 2
    assert latency.total == pytest.approx(0.202)


async def test_values_of_a_loop_are_read_on_it():
    seen: list[int] = []

    def read():
        seen.append(threading.get_ident())
        return [SENT.read(7)]

    there = on_loop(read)
    assert [reading.value for reading in await asyncio.to_thread(there)] == [7]
    assert [reading.value for reading in there()] == [7]
    assert set(seen) == {threading.get_ident()}


async def test_a_loop_that_is_stuck_has_no_values(monkeypatch):
    monkeypatch.setattr(metrics, "READ_TIMEOUT_S", 0.01)
    there, answers = on_loop(lambda: [SENT.read(7)]), []
    thread = threading.Thread(target=lambda: answers.append(there()))
    thread.start()
    thread.join()  # on the loop's own thread: nothing runs on it meanwhile
    assert answers == [()]
    await asyncio.sleep(0)  # what it asked for comes too late, and is given up


def test_registries_are_apart():
    first, second = RpcStats("first"), RpcStats("second")
    first.method("/p.S/M").finished(code="OK", seconds=0.1)
    assert 'service="first"' in text_of(first)
    assert 'service="first"' not in text_of(second)
