"""Rows of the graph, from what a worker asked and a host answered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.meg_store.v1.graph_pb2 import Sample, Vertex
from flexmarl.api.rollout.v1.engine_pb2 import GenerateResult
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.api.rollout.v1.worker_pb2 import AgentCall, SampleEnd
from flexmarl.core.errors import DomainError
from flexmarl.core.row_limits import MAX_PAYLOAD_BYTES, may_exceed, too_large

_ALL_COLUMNS: Final = ("prompt_tokens", "response_tokens", "logprobs")


def done_vertex(
    spec: SampleSpec,
    call: AgentCall,
    result: GenerateResult,
    *,
    attempt: int,
    trainable: bool,
    ready_unix_ns: int,
    dispatched_unix_ns: int,
    finished_unix_ns: int,
) -> Vertex:
    """The row of an accepted attempt."""
    vertex = _begun(spec, call, attempt=attempt, trainable=trainable)
    meta = vertex.meta
    meta.status = common_pb2.VERTEX_STATUS_DONE
    if call.extends_vertex_id:
        meta.extends_vertex_id = call.extends_vertex_id
    meta.policy_version = result.version
    meta.weights_hash = result.weights_hash
    meta.version_runs.extend(result.version_runs)
    tokens = result.tokens[:]
    meta.num_response_tokens = len(tokens)
    meta.finish_reason = result.finish_reason
    meta.instance_id = result.instance_id
    meta.ready_columns.extend(_ALL_COLUMNS)
    meta.ready_unix_ns = ready_unix_ns
    meta.dispatched_unix_ns = dispatched_unix_ns
    meta.finished_unix_ns = finished_unix_ns
    # Slices: the library copies lists faster than its own fields.
    payload = vertex.payload
    payload.response_tokens.extend(tokens)
    payload.logprobs.extend(result.logprobs[:])
    return vertex


def excess(vertex: Vertex) -> DomainError | None:
    """Why the row of an accepted attempt fits no write; None, as nearly always: it does."""
    meta = vertex.meta
    prompt, response = meta.num_prompt_tokens, meta.num_response_tokens
    if not may_exceed(num_prompt_tokens=prompt, num_response_tokens=response):
        return None
    size_bytes = vertex.payload.ByteSize()
    if size_bytes <= MAX_PAYLOAD_BYTES:
        return None
    return too_large(
        f"agent {meta.agent!r}: a prompt of {prompt} tokens and an answer of {response}",
        size_bytes=size_bytes,
        max_bytes=MAX_PAYLOAD_BYTES,
        remedy="lower its max_tokens",
    )


def keep_payloads(vertices: Iterable[Vertex], *, max_bytes: int) -> None:
    """Leaves the prompts of ended calls to the first ones, so that they fit one write."""
    for vertex in vertices:
        max_bytes -= vertex.payload.ByteSize()
        if max_bytes < 0:
            vertex.ClearField("payload")


def ended_vertex(
    spec: SampleSpec,
    call: AgentCall,
    status: common_pb2.VertexStatus.ValueType,
    *,
    attempt: int,
    trainable: bool,
    ready_unix_ns: int,
    dispatched_unix_ns: int,
    finished_unix_ns: int,
    failure: Failure | None = None,
) -> Vertex:
    """The row of a call that failed for good, or was cut."""
    vertex = _begun(spec, call, attempt=attempt, trainable=trainable)
    meta = vertex.meta
    meta.status = status
    meta.policy_version = spec.version
    if failure is not None:
        meta.failure.CopyFrom(failure)
    meta.ready_unix_ns = ready_unix_ns
    meta.dispatched_unix_ns = dispatched_unix_ns
    meta.finished_unix_ns = finished_unix_ns
    return vertex


def _begun(spec: SampleSpec, call: AgentCall, *, attempt: int, trainable: bool) -> Vertex:
    """What rows of a call have in common; set field by field, twice as fast as by keywords."""
    vertex = Vertex()
    meta = vertex.meta
    meta.vertex_id = call.vertex_id
    meta.sample_id = spec.sample_id
    meta.group_id = spec.group_id
    meta.batch = spec.batch
    meta.batch_attempt = spec.batch_attempt
    meta.sample_attempt = spec.sample_attempt
    meta.attempt = attempt
    meta.path = call.path
    meta.agent = call.agent
    meta.policy = call.policy
    meta.kind = common_pb2.VERTEX_KIND_AGENT
    meta.input_hash = call.input_hash
    meta.upstream_vertex_ids.extend(call.upstream_vertex_ids)
    prompt = call.prompt_tokens[:]
    meta.num_prompt_tokens = len(prompt)
    meta.trainable = trainable
    payload = vertex.payload
    payload.prompt_tokens.extend(prompt)
    payload.temperature = call.sampling.temperature
    return vertex


def open_sample(spec: SampleSpec) -> Sample:
    """The row of an admitted sample; a function of the spec: the same again is no change."""
    return Sample(
        sample_id=spec.sample_id,
        group_id=spec.group_id,
        batch=spec.batch,
        batch_attempt=spec.batch_attempt,
        ordinal=spec.ordinal,
        sample_attempt=spec.sample_attempt,
        status=common_pb2.SAMPLE_STATUS_OPEN,
    )


def leaving_sample(spec: SampleSpec, *, left: Iterable[str], used: Iterable[str]) -> Sample:
    """The row of an open sample that will not call some policies again."""
    sample = open_sample(spec)
    sample.left_policies.extend(sorted(left))
    sample.used_policies.extend(sorted(used))
    return sample


def ended_sample(
    spec: SampleSpec,
    end: SampleEnd,
    *,
    used: Iterable[str],
    num_vertices: int,
    versions: tuple[int, int],
    started_unix_ns: int,
    finished_unix_ns: int,
) -> Sample:
    """The row of a sample attempt that ended."""
    sample = open_sample(spec)
    sample.status = end.status
    if end.HasField("rewards"):
        sample.rewards.CopyFrom(end.rewards)
    if end.HasField("failure"):
        sample.failure.CopyFrom(end.failure)
    sample.output_json = end.output_json
    sample.used_policies.extend(sorted(used))
    sample.num_vertices = num_vertices
    sample.min_version, sample.max_version = versions
    sample.started_unix_ns = started_unix_ns
    sample.finished_unix_ns = finished_unix_ns
    return sample
