"""Spans are recorded, bounded and survive a torn file."""

import json

import pytest

from flexmarl.core.call_context import bind_ids, reset_ids
from flexmarl.runtime.spans import Span, SpanRecorder, read_spans


@pytest.fixture
def clock():
    times = iter(range(1000))
    return lambda: float(next(times))


def test_a_block_is_a_span_also_when_it_raises(tmp_path, clock):
    spans = SpanRecorder(service="rollout", clock=clock)
    reset_ids()
    bind_ids(batch="3")
    with spans.span("instance/0", "solver", tokens=5):
        pass
    with pytest.raises(ValueError, match="broken"), spans.span("instance/1", "verifier"):
        raise ValueError("broken")
    reset_ids()
    path = spans.flush(tmp_path)
    assert [span for _, span in read_spans(tmp_path)] == [
        Span("instance/0", "solver", 0.0, 1.0, {"batch": "3", "tokens": 5}),
        Span("instance/1", "verifier", 2.0, 3.0, {"batch": "3"}),
    ]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_flushes_append_and_empty_the_ring(tmp_path):
    spans = SpanRecorder(service="trainer")
    for number in range(3):
        spans.add("device/0", f"step{number}", number, number + 1)
        spans.flush(tmp_path)
    spans.flush(tmp_path)
    assert [span.name for _, span in read_spans(tmp_path)] == ["step0", "step1", "step2"]
    assert spans.dropped == 0


def test_a_full_ring_drops_the_oldest_and_counts(tmp_path):
    spans = SpanRecorder(service="trainer", capacity=10)
    for number in range(25):
        spans.add("device/0", str(number), 0, 0)
    assert spans.dropped == 15
    spans.flush(tmp_path)
    assert [span.name for _, span in read_spans(tmp_path)] == [str(n) for n in range(15, 25)]
    assert spans.dropped == 15


def test_a_torn_last_line_is_skipped(tmp_path):
    spans = SpanRecorder(service="trainer")
    spans.add("device/0", "whole", 0, 1)
    path = spans.flush(tmp_path)
    with path.open("a") as file:
        file.write('{"track": "device/0", "na')
    assert [span.name for _, span in read_spans(tmp_path)] == ["whole"]
