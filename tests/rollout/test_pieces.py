"""Messages that are too large for one frame."""

from __future__ import annotations

from flexmarl.api.meg_store.v1.graph_pb2 import Vertex, VertexMeta
from flexmarl.api.rollout.v1.engine_pb2 import (
    ConnectEngineHostResponse,
    GenerateRequest,
    GenerateResult,
    InstancePlan,
    LoadWeights,
)
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.api.rollout.v1.worker_pb2 import (
    AgentCall,
    SampleEnd,
    WorkerCommand,
    WorkerEvent,
    WorkerSample,
    WorkerSetup,
)
from flexmarl.core.keepalive import MAX_MESSAGE_BYTES
from flexmarl.rollout.host.outbox import Outbox
from flexmarl.rollout.pieces import frames_of, parts_of
from flexmarl.runtime.message_batches import BATCH_BYTES


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


def test_what_a_host_is_sent_at_once_is_parted_and_keeps_its_order():
    """Room first; then what there shall be; then what uses it; then what is not to be."""
    requests = [GenerateRequest(attempt_id=f"v{n}#1", prompt_tokens=[1] * 40) for n in range(5)]
    whole = ConnectEngineHostResponse(
        plan=InstancePlan(run_id="r"), loads=[LoadWeights(version=3)], requests=requests,
        aborts=["v0#1"], stored=["w#1"],
    )  # fmt: skip
    assert list(parts_of(whole, large="requests", first="stored")) == [whole]
    two = 2 * requests[0].ByteSize()
    first, *parts, last = parts_of(whole, large="requests", first="stored", limit_bytes=two)
    assert first == ConnectEngineHostResponse(plan=whole.plan, loads=whole.loads, stored=["w#1"])
    assert [[r.attempt_id for r in part.requests] for part in parts] == [
        ["v0#1", "v1#1"], ["v2#1", "v3#1"], ["v4#1"],
    ]  # fmt: skip
    assert last == ConnectEngineHostResponse(aborts=["v0#1"])
    alone = ConnectEngineHostResponse(requests=requests)
    parts = list(parts_of(alone, large="requests", first="stored", limit_bytes=1))
    assert [len(part.requests) for part in parts] == [1] * 5


async def test_what_a_host_kept_for_a_dispatcher_that_was_away_goes_in_messages_that_it_takes():
    """Together they are more than one holds: that one would be refused, and sent again for ever."""
    tokens = [1 << 20] * 500_000
    kept = [GenerateResult(attempt_id=f"v{n}#1", tokens=tokens) for n in range(50)]
    assert sum(result.ByteSize() for result in kept) > MAX_MESSAGE_BYTES
    outbox = Outbox()
    outbox.reset(kept)
    sent = []
    while not outbox.empty:
        message = await outbox.take()
        assert message.ByteSize() < BATCH_BYTES + (1 << 20)
        sent += [result.attempt_id for result in message.results]
    assert sent == [result.attempt_id for result in kept]
