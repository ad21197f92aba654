"""The timeline: a file that trace viewers read, with nothing overlapping on one thread."""

import itertools
import json
from pathlib import Path

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.client.timeline import (
    TraceSpan,
    batch_spans,
    queue_counters,
    recorded_span,
    vertex_spans,
    write_trace,
)


def vertex(number: int, ready: int, sent: int, finished: int) -> graph_pb2.VertexMeta:
    return graph_pb2.VertexMeta(
        vertex_id=f"b000000a0-g0000-s000a0/0:{number}",
        agent="sorter",
        policy="sorter",
        instance_id="sorter-0",
        status=common_pb2.VERTEX_STATUS_DONE,
        ready_unix_ns=ready,
        dispatched_unix_ns=sent,
        finished_unix_ns=finished,
    )


def read(path: Path) -> tuple[list[dict], list[dict]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [e for e in events if e["ph"] == "X"], [e for e in events if e["ph"] == "M"]


def test_overlapping_requests_go_to_lanes_of_their_instance(tmp_path: Path):
    spans = vertex_spans([vertex(0, 1000, 2000, 9000), vertex(1, 1000, 3000, 5000)])
    assert write_trace(spans, tmp_path / "t.json") == 2
    work, names = read(tmp_path / "t.json")
    for thread in {event["tid"] for event in work}:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if e["tid"] == thread)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))
    labels = {event["args"]["name"] for event in names}
    assert labels == {"instances", "sorter-0", "sorter-0 (2)"}


def test_a_vertex_that_was_never_sent_makes_no_serving_span():
    assert list(vertex_spans([vertex(0, 1000, 0, 0)])) == []


def test_a_batch_lasts_from_commit_to_commit():
    manifests = [
        graph_pb2.Manifest(version=0, committed_unix_ns=1000),
        graph_pb2.Manifest(version=1, committed_unix_ns=5000, batch=graph_pb2.BatchRecord(batch=0)),
    ]
    (span,) = batch_spans(manifests)
    assert (span.name, span.start_ns, span.end_ns) == ("batch 0", 1000, 5000)


def test_the_parts_of_a_step_lie_within_its_batch(tmp_path: Path):
    parts = {"step/hand_over_s": 1.0, "step/rollout_s": 4.0, "step/training_tail_s": 2.0}
    # The clocks differ a little: the parts are longer than the batch.
    batch = graph_pb2.BatchRecord(batch=0, metrics={**parts, "step/commit_s": 9.0})
    manifests = [
        graph_pb2.Manifest(version=0, committed_unix_ns=10_000_000_000),
        graph_pb2.Manifest(version=1, committed_unix_ns=16_500_000_000, batch=batch),
    ]
    write_trace(batch_spans(manifests), tmp_path / "t.json")
    work, _ = read(tmp_path / "t.json")
    assert {event["tid"] for event in work} == {1}
    assert [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in work] == [
        ("batch 0", 0, 6.5),
        ("hand over", 0, 1),
        ("rollout", 1, 4),
        ("training tail", 5, 1.5),
        ("commit", 6.5, 0),
    ]


def test_recorded_tracks_stand_with_their_kind():
    kinds = {
        ("trainer", "slot/slot0"): ("slots", "slot0"),
        ("trainer", "swap/slot0"): ("swaps", "slot0"),
        ("orchestrator", "policy/solver"): ("policies", "solver"),
        ("rollout", "moves/solver-0"): ("moves", "solver-0"),
        ("orchestrator", "orchestrator"): ("orchestrator", "orchestrator"),
    }
    for (service, track), expected in kinds.items():
        span = recorded_span(service, track, "x", 1.0, 2.0, {})
        assert (span.process, span.track) == expected
        assert (span.start_ns, span.end_ns) == (10**9, 2 * 10**9)


def test_an_empty_timeline_is_still_a_trace(tmp_path: Path):
    assert write_trace([], tmp_path / "t.json") == 0
    assert read(tmp_path / "t.json") == ([], [])


def test_times_are_microseconds_from_the_first_span(tmp_path: Path):
    spans = [TraceSpan("trainer", "slot0", "apply", 7_000_000, 9_000_000, {"policy": "x"})]
    write_trace(spans, tmp_path / "t.json")
    ((event,), _) = read(tmp_path / "t.json")
    assert (event["ts"], event["dur"], event["args"]) == (0, 2000, {"policy": "x"})


def test_queues_go_up_when_ready_and_down_when_sent(tmp_path: Path):
    vertices = [vertex(0, 1000, 2000, 9000), vertex(1, 1000, 3000, 5000), vertex(2, 4000, 0, 0)]
    assert write_trace([], tmp_path / "t.json", counters=queue_counters(vertices)) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    curve = [(e["ts"], e["args"]["waiting"]) for e in events if e["ph"] == "C"]
    assert curve == [(0, 1), (0, 2), (1, 1), (2, 0)]
