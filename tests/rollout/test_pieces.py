"""Messages that are too large for one frame."""

from __future__ import annotations

from flexmarl.api.meg_store.v1.graph_pb2 import Vertex, VertexMeta
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.api.rollout.v1.worker_pb2 import (
    AgentCall,
    SampleEnd,
    WorkerCommand,
    WorkerEvent,
    WorkerSample,
    WorkerSetup,
)
from flexmarl.rollout.pieces import frames_of


def test_what_is_too_large_for_a_frame_goes_in_several():
    vertex = Vertex(meta=VertexMeta(vertex_id="v"))
    event = WorkerEvent(
        calls=[AgentCall(vertex_id=name * 40) for name in "ab"],
        tools=[vertex],
        cancelled_vertex_ids=["c", "d"],
        ends=[SampleEnd(sample_id="s")],
    )
    (whole,) = frames_of(event)
    assert WorkerEvent.FromString(whole) == event
    pieces = [WorkerEvent.FromString(frame) for frame in frames_of(event, limit_bytes=100)]
    assert len(pieces) == 6
    merged = WorkerEvent()
    for piece in pieces:
        merged.MergeFrom(piece)
    assert merged == event
    command = WorkerCommand(
        setup=WorkerSetup(run_id="r"),
        start=[WorkerSample(spec=SampleSpec(sample_id=f"s{n}")) for n in (0, 1)],
    )
    pieces = [WorkerCommand.FromString(frame) for frame in frames_of(command, limit_bytes=20)]
    assert [p.HasField("setup") for p in pieces] == [True, False, False]
    assert [s.spec.sample_id for p in pieces for s in p.start] == ["s0", "s1"]
