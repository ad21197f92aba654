"""Metrics are read when scraped."""

from prometheus_client import generate_latest

from flexmarl.runtime.metrics import GaugeSource, RpcStats, new_registry


def test_gauges_are_read_at_the_scrape():
    registry, gauges, queue = new_registry(), GaugeSource(), [1, 2]
    registry.register(gauges)
    gauges.add("queued", "Waiting items.", lambda: float(len(queue)))
    assert b"flexmarl_queued 2.0" in generate_latest(registry)
    queue.append(3)
    assert b"flexmarl_queued 3.0" in generate_latest(registry)


def test_latencies_fall_into_cumulative_buckets():
    registry, stats = new_registry(), RpcStats("store")
    registry.register(stats)
    method = stats.method("/p.S/M")
    for seconds in (0.0004, 0.001, 0.02, 100.0):
        method.finished(code="OK", seconds=seconds)
    text = generate_latest(registry).decode()
    counts = {
        line.split('le="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("flexmarl_rpc_seconds_bucket")
    }
    assert (counts["0.0005"], counts["0.001"], counts["0.025"]) == (1.0, 2.0, 3.0)
    assert (counts["30"], counts["+Inf"]) == (3.0, 4.0)


def test_registries_are_apart():
    first, second = new_registry(), new_registry()
    for registry in (first, second):
        registry.register(RpcStats("store"))
    assert b"flexmarl_rpc" in generate_latest(first)
