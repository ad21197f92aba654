"""One timeline of a run as Chrome trace JSON; opens in Perfetto and chrome://tracing.

Tracks, grouped as processes of the trace: `batches` (from commit to commit, and below it the parts
of the step), `instances` (each request while it was served), `queues` (how many requests waited, a
curve per policy), and what the services recorded: `policies` (work handed to trainers), `slots`
(work on devices), `swaps` (state moved onto and off them), `moves` (instances between policies),
`weights` (instances that load them), `orchestrator`.

Format: "Trace Event Format" with times in microseconds: complete events (`ph: X`), counters
(`ph: C`), and metadata events (`ph: M`) that name processes and threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2

_STATUS = common_pb2.VertexStatus

PROCESSES: Final = {
    "policy": "policies",
    "slot": "slots",
    "swap": "swaps",
    "moves": "moves",
    "weights": "weights",
}
"""Process of the trace by the first word of a recorded track; others are their service's."""

_PARTS: Final = ("hand_over", "rollout", "training_tail")
"""Parts of a step from the commit before it; what is left up to its own commit is that."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One piece of work on the timeline.

    Attributes:
        process: Group of tracks.
        track: Track.
        name: What is written on it.
        start_ns: Unix nanoseconds.
        end_ns: Unix nanoseconds.
        args: Shown beside it.
        overlapping: True for a track on which spans overlap; they are spread over lanes.
    """

    process: str
    track: str
    name: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)
    overlapping: bool = False


@dataclass(frozen=True, slots=True)
class TraceCounter:
    """A value from a moment on.

    Attributes:
        process: Group of tracks.
        name: Curve.
        time_ns: Unix nanoseconds.
        value: The value.
    """

    process: str
    name: str
    time_ns: int
    value: int


def vertex_spans(vertices: Iterable[graph_pb2.VertexMeta]) -> Iterator[TraceSpan]:
    """Serving of each vertex."""
    for vertex in vertices:
        if not (vertex.dispatched_unix_ns and vertex.finished_unix_ns):
            continue
        yield TraceSpan(
            "instances",
            vertex.instance_id or vertex.agent,
            vertex.agent,
            vertex.dispatched_unix_ns,
            vertex.finished_unix_ns,
            {
                "vertex": vertex.vertex_id,
                "policy": vertex.policy,
                "version": vertex.policy_version,
                "tokens": vertex.num_response_tokens,
                "status": _STATUS.Name(vertex.status).removeprefix("VERTEX_STATUS_").lower(),
            },
            overlapping=True,
        )


def queue_counters(vertices: Iterable[graph_pb2.VertexMeta]) -> Iterator[TraceCounter]:
    """Requests that waited, per policy: up when one became ready, down when it was sent."""
    steps: dict[str, list[tuple[int, int]]] = {}
    for vertex in vertices:
        if vertex.policy and vertex.ready_unix_ns and vertex.dispatched_unix_ns:
            changes = steps.setdefault(vertex.policy, [])
            changes += [(vertex.ready_unix_ns, 1), (vertex.dispatched_unix_ns, -1)]
    for policy, changes in sorted(steps.items()):
        waiting = 0
        for time_ns, change in sorted(changes):
            waiting += change
            yield TraceCounter("queues", policy, time_ns, waiting)


def batch_spans(manifests: Iterable[graph_pb2.Manifest]) -> Iterator[TraceSpan]:
    """Each batch from the commit before it to its own, and the parts of its step within it."""
    before_ns = 0
    for manifest in manifests:
        if before_ns and manifest.HasField("batch"):
            yield TraceSpan(
                "batches",
                "team",
                f"batch {manifest.batch.batch}",
                before_ns,
                manifest.committed_unix_ns,
                {"version": manifest.version, **dict(manifest.batch.metrics)},
            )
            yield from _step_spans(manifest, before_ns)
        before_ns = manifest.committed_unix_ns


def _step_spans(manifest: graph_pb2.Manifest, start_ns: int) -> Iterator[TraceSpan]:
    """The parts were measured by another clock: the last one takes what is over or missing."""
    metrics, end_ns = manifest.batch.metrics, manifest.committed_unix_ns
    if not all(f"step/{part}_s" in metrics for part in _PARTS):
        return
    for part in (*_PARTS, "commit"):
        length_ns = int(metrics.get(f"step/{part}_s", 0.0) * 1e9)
        stop_ns = end_ns if part == "commit" else min(start_ns + length_ns, end_ns)
        yield TraceSpan("batches", "team", part.replace("_", " "), start_ns, stop_ns)
        start_ns = stop_ns


def recorded_span(
    service: str, track: str, name: str, start_s: float, end_s: float, args: Mapping[str, Any]
) -> TraceSpan:
    """A span that a service recorded, in the process that its track belongs to.

    Args:
        service: Who recorded it.
        track: Track, such as `slot/slot0`.
        name: What was done.
        start_s: Unix seconds.
        end_s: Unix seconds.
        args: Ids and counts.
    """
    word, _, rest = track.partition("/")
    process = PROCESSES.get(word, service)
    start_ns, end_ns = int(start_s * 1e9), int(end_s * 1e9)
    return TraceSpan(process, rest or word, name, start_ns, end_ns, args, overlapping=True)


def write_trace(
    spans: Iterable[TraceSpan], path: Path, *, counters: Iterable[TraceCounter] = ()
) -> int:
    """Write a trace file, atomically.

    Returns:
        Number of spans in it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    # A span before those within it, so that they nest.
    ordered = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            for number, event in enumerate(_events(ordered, list(counters))):
                file.write((",\n" if number else "\n") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(ordered)


def _events(spans: list[TraceSpan], counters: list[TraceCounter]) -> Iterator[dict[str, Any]]:
    starts = [span.start_ns for span in spans] + [counter.time_ns for counter in counters]
    origin_ns = min(starts, default=0)
    tracks = _Tracks()
    for span in spans:
        process, thread = tracks.place(span)
        yield {
            "ph": "X",
            "pid": process,
            "tid": thread,
            "name": span.name,
            "ts": (span.start_ns - origin_ns) / 1000,
            "dur": max(span.end_ns - span.start_ns, 0) / 1000,
            "args": dict(span.args),
        }
    for counter in counters:
        yield {
            "ph": "C",
            "pid": tracks.process(counter.process),
            "name": counter.name,
            "ts": (counter.time_ns - origin_ns) / 1000,
            "args": {"waiting": counter.value},
        }
    yield from tracks.names()


class _Tracks:
    """Numbers for processes and threads of the trace.

    The format wants spans of one thread nested; requests of one instance overlap, so each goes to
    the first lane that is free when it starts.
    """

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str, int], int] = {}
        self._lanes: dict[tuple[str, str], list[int]] = {}

    def place(self, span: TraceSpan) -> tuple[int, int]:
        process = self.process(span.process)
        lane = self._lane(span) if span.overlapping else 0
        thread = self._threads.setdefault((span.process, span.track, lane), len(self._threads) + 1)
        return process, thread

    def process(self, name: str) -> int:
        return self._processes.setdefault(name, len(self._processes) + 1)

    def names(self) -> Iterator[dict[str, Any]]:
        for name, process in self._processes.items():
            yield _name_event("process_name", process, 0, name)
        for (process_name, track, lane), thread in self._threads.items():
            label = track if lane == 0 else f"{track} ({lane + 1})"
            yield _name_event("thread_name", self._processes[process_name], thread, label)

    def _lane(self, span: TraceSpan) -> int:
        ends = self._lanes.setdefault((span.process, span.track), [])
        for lane, end_ns in enumerate(ends):
            if end_ns <= span.start_ns:
                ends[lane] = span.end_ns
                return lane
        ends.append(span.end_ns)
        return len(ends) - 1


def _name_event(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
