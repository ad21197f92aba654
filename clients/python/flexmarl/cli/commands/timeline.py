"""`flexmarl timeline`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.cluster.plan import SERVICES
from flexmarl.cli.connect import with_run
from flexmarl.cli.output import print_line
from flexmarl.client.store import StoreClient
from flexmarl.client.timeline import (
    TraceSpan,
    batch_spans,
    queue_counters,
    recorded_span,
    vertex_spans,
    write_trace,
)
from flexmarl.runtime.spans import read_spans


def timeline(run_id: str, *, out: Path, data_dir: Path, cluster: Sequence[str]) -> None:
    """Write a run's timeline."""

    async def write(store: StoreClient, folder: ClusterFolder, _run: graph_pb2.Run) -> int:
        manifests = await store.list_manifests(run_id)
        vertices = [vertex.meta async for vertex in store.list_vertices(run_id)]
        spans = [
            *batch_spans(manifests),
            *vertex_spans(vertices),
            *_service_spans(folder, run_id),
        ]
        return write_trace(spans, out, counters=queue_counters(vertices))

    count = with_run(write, run_id, data_dir=data_dir, cluster=cluster)
    print_line(f"{count} spans: {out} (open it in https://ui.perfetto.dev or chrome://tracing)")


def _service_spans(folder: ClusterFolder, run_id: str) -> Iterator[TraceSpan]:
    for name in SERVICES:
        spans = folder.service(name) / "spans"
        for place in (spans, spans / run_id):  # the dispatcher keeps each run's apart
            for _, span in read_spans(place):
                # A span without a run is the service's own, such as a swap of slots.
                if span.args.get("run", run_id) == run_id:
                    yield recorded_span(
                        name, span.track, span.name, span.start_s, span.end_s, span.args
                    )
