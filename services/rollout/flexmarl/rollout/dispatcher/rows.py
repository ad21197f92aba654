"""Rows of the graph, from what a worker asked and a host answered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.common.v1alpha1.common_pb2 import Failure
from flexmarl.api.meg_store.v1alpha1.graph_pb2 import Sample, Vertex, VertexMeta, VertexPayload
from flexmarl.api.rollout.v1alpha1.engine_pb2 import GenerateResult
from flexmarl.api.rollout.v1alpha1.rollout_pb2 import SampleSpec
from flexmarl.api.rollout.v1alpha1.worker_pb2 import AgentCall, SampleEnd

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
    return Vertex(
        meta=VertexMeta(
            vertex_id=call.vertex_id,
            sample_id=spec.sample_id,
            group_id=spec.group_id,
            batch=spec.batch,
            batch_attempt=spec.batch_attempt,
            sample_attempt=spec.sample_attempt,
            attempt=attempt,
            path=call.path,
            agent=call.agent,
            policy=call.policy,
            kind=common_pb2.VERTEX_KIND_AGENT,
            status=common_pb2.VERTEX_STATUS_DONE,
            input_hash=call.input_hash,
            upstream_vertex_ids=call.upstream_vertex_ids,
            extends_vertex_id=call.extends_vertex_id,
            policy_version=result.version,
            weights_hash=result.weights_hash,
            version_runs=result.version_runs,
            num_prompt_tokens=len(call.prompt_tokens),
            num_response_tokens=len(result.tokens),
            finish_reason=result.finish_reason,
            instance_id=result.instance_id,
            ready_columns=_ALL_COLUMNS,
            ready_unix_ns=ready_unix_ns,
            dispatched_unix_ns=dispatched_unix_ns,
            finished_unix_ns=finished_unix_ns,
            trainable=trainable,
        ),
        payload=VertexPayload(
            prompt_tokens=call.prompt_tokens,
            response_tokens=result.tokens,
            logprobs=result.logprobs,
            temperature=call.sampling.temperature,
        ),
    )


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
    return Vertex(
        meta=VertexMeta(
            vertex_id=call.vertex_id,
            sample_id=spec.sample_id,
            group_id=spec.group_id,
            batch=spec.batch,
            batch_attempt=spec.batch_attempt,
            sample_attempt=spec.sample_attempt,
            attempt=attempt,
            path=call.path,
            agent=call.agent,
            policy=call.policy,
            kind=common_pb2.VERTEX_KIND_AGENT,
            status=status,
            input_hash=call.input_hash,
            upstream_vertex_ids=call.upstream_vertex_ids,
            policy_version=spec.version,
            num_prompt_tokens=len(call.prompt_tokens),
            failure=failure,
            ready_unix_ns=ready_unix_ns,
            dispatched_unix_ns=dispatched_unix_ns,
            finished_unix_ns=finished_unix_ns,
            trainable=trainable,
        ),
        payload=VertexPayload(
            prompt_tokens=call.prompt_tokens, temperature=call.sampling.temperature
        ),
    )


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
