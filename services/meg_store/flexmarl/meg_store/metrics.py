"""What a store exposes to Prometheus.

Latencies are those of its calls, which every server keeps; sizes and counts are the rooms' own
running sums. Nothing is counted per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flexmarl.meg_store.shard import Shard
from flexmarl.runtime.metrics import Reading, RpcStats, counter, gauge, histogram

OPERATION_SECONDS: Final = histogram(
    "flexmarl_store_operation_seconds",
    "Seconds of finished calls, durability included: `write` rows, `read` rows by reference, "
    "`claim` rows for a micro-batch (list, record, mark), `commit` state and versions.",
    "operation",
)
_OPERATIONS: Final = {
    "write": ("WriteGraph", "WriteColumns"),
    "read": ("GetVertices",),
    "claim": ("ListClaimable", "CreateMicroBatch", "MarkRows"),
    "commit": ("SaveState", "Commit"),
}

_NUMBERS: Final = {
    "runs": gauge("flexmarl_store_runs", "Stored runs."),
    "queued_bytes": gauge("flexmarl_store_queued_bytes", "Bytes that wait for the writer."),
    "write_groups": counter(
        "flexmarl_store_write_groups_total", "Groups of batches written at once."
    ),
    "syncs": counter("flexmarl_store_syncs_total", "Flushes of the write-ahead log."),
    "late_results": counter(
        "flexmarl_store_late_results_total", "Results that came second and were kept aside."
    ),
    "segments": gauge("flexmarl_store_segments", "State segments."),
    "leases": gauge("flexmarl_store_leases", "Leases on segments, held by readers."),
    "memory_tier_bytes": gauge("flexmarl_store_memory_tier_bytes", "State in shared memory."),
    "disk_tier_bytes": gauge("flexmarl_store_disk_tier_bytes", "State on disk."),
    "pool_bytes": gauge(
        "flexmarl_store_pool_bytes", "Shared memory that is kept to be written to again."
    ),
    "segments_spilled": counter(
        "flexmarl_store_segments_spilled_total", "Segments put on disk as memory was full."
    ),
    "disk_free_bytes": gauge(
        "flexmarl_store_disk_free_bytes", "Free space of the disk that the data are on."
    ),
}
"""By their names in GetStats."""

METRICS: Final = (OPERATION_SECONDS, *_NUMBERS.values())


def readings(shard: Shard, stats: RpcStats, *, service: str) -> Iterator[Reading]:
    """All values now.

    Args:
        shard: The open shard.
        stats: Of the server's calls.
        service: Full name of the service that they belong to.
    """
    for operation, methods in _OPERATIONS.items():
        latency = stats.latency(f"/{service}/{method}" for method in methods)
        yield OPERATION_SECONDS.read(latency, operation)
    for name, value in shard.numbers().items():
        yield _NUMBERS[name].read(value)
