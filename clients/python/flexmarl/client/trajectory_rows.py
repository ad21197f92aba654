"""Stored groups, samples and vertices as rows of the exported tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from google.protobuf.json_format import MessageToDict

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2

Row: TypeAlias = dict[str, Any]
Decode: TypeAlias = Callable[[str, Sequence[int]], str]
"""Text of tokens under the tokenizer of a policy."""


def group_row(run_id: str, group: graph_pb2.Group) -> Row:
    """A row of `groups`."""
    return {
        "run_id": run_id,
        "batch": group.batch,
        "batch_attempt": group.batch_attempt,
        "group_id": group.group_id,
        "ordinal": group.ordinal,
        "query_index": group.query_index,
        "query_json": _text(group.query_json),
        "num_samples": group.num_samples,
        "status": _name(common_pb2.GroupStatus, "GROUP_STATUS_", group.status),
        "drop_reason": _name(common_pb2.VoidReason, "VOID_REASON_", group.drop_reason),
        "opened_unix_ns": group.opened_unix_ns,
        "closed_unix_ns": group.closed_unix_ns or None,
    }


def sample_row(run_id: str, sample: graph_pb2.Sample) -> Row:
    """A row of `samples`."""
    rewards = sample.rewards
    return {
        "run_id": run_id,
        "batch": sample.batch,
        "batch_attempt": sample.batch_attempt,
        "group_id": sample.group_id,
        "sample_id": sample.sample_id,
        "ordinal": sample.ordinal,
        "sample_attempt": sample.sample_attempt,
        "status": _name(common_pb2.SampleStatus, "SAMPLE_STATUS_", sample.status),
        "team_reward": rewards.team if rewards.HasField("team") else None,
        "agent_rewards": dict(rewards.agents),
        "vertex_rewards": dict(rewards.vertices),
        "metrics": dict(rewards.metrics),
        "output_json": _text(sample.output_json) or None,
        "num_vertices": sample.num_vertices,
        "failure": sample.failure.message or None,
        "started_unix_ns": sample.started_unix_ns,
        "finished_unix_ns": sample.finished_unix_ns or None,
    }


def vertex_row(
    run_id: str, vertex: graph_pb2.Vertex, *, consumed: Mapping[str, int], decode: Decode
) -> Row:
    """A row of `vertices`.

    Args:
        run_id: Run.
        vertex: With payload.
        consumed: Version that consumed each micro-batch, by id.
        decode: Makes texts of tokens.
    """
    meta, data = vertex.meta, vertex.payload
    is_agent = meta.kind == common_pb2.VERTEX_KIND_AGENT
    return {
        "run_id": run_id,
        "batch": meta.batch,
        "batch_attempt": meta.batch_attempt,
        "group_id": meta.group_id,
        "sample_id": meta.sample_id,
        "vertex_id": meta.vertex_id,
        "path": meta.path,
        "agent": meta.agent,
        "policy": meta.policy or None,
        "kind": _name(common_pb2.VertexKind, "VERTEX_KIND_", meta.kind),
        "status": _name(common_pb2.VertexStatus, "VERTEX_STATUS_", meta.status),
        "attempt": meta.attempt,
        "policy_version": meta.policy_version,
        "weights_hash": meta.weights_hash or None,
        "trainable": meta.trainable,
        "reward": meta.reward if meta.HasField("reward") else None,
        "advantage": meta.advantage if meta.HasField("advantage") else None,
        "void_reason": _name(common_pb2.VoidReason, "VOID_REASON_", meta.void_reason),
        "micro_batch_id": meta.micro_batch_id or None,
        "consumed_by_version": consumed.get(meta.micro_batch_id),
        "prompt_tokens": list(data.prompt_tokens) if is_agent else None,
        "response_tokens": list(data.response_tokens) if is_agent else None,
        "logprobs": list(data.logprobs) if is_agent else None,
        "temperature": data.temperature if is_agent else None,
        "input_text": decode(meta.policy, data.prompt_tokens)
        if is_agent
        else _text(data.tool_input),
        "output_text": decode(meta.policy, data.response_tokens)
        if is_agent
        else _text(data.output),
        "num_prompt_tokens": meta.num_prompt_tokens,
        "num_response_tokens": meta.num_response_tokens,
        "finish_reason": meta.finish_reason or None,
        "instance_id": meta.instance_id or None,
        "columns_json": _columns(data.columns),
        "failure": meta.failure.message or None,
        "ready_unix_ns": meta.ready_unix_ns,
        "dispatched_unix_ns": meta.dispatched_unix_ns or None,
        "finished_unix_ns": meta.finished_unix_ns,
    }


def edge_rows(run_id: str, vertex: graph_pb2.Vertex) -> Iterator[Row]:
    """Rows of `edges` into a vertex."""
    for upstream in vertex.meta.upstream_vertex_ids:
        yield {
            "run_id": run_id,
            "sample_id": vertex.meta.sample_id,
            "upstream_vertex_id": upstream,
            "vertex_id": vertex.meta.vertex_id,
        }


def _columns(columns: Mapping[str, graph_pb2.ColumnValue]) -> str:
    return json.dumps({name: _value(columns[name]) for name in sorted(columns)})


def _value(value: graph_pb2.ColumnValue) -> object:
    """A declared column's value as JSON has it; a reference is its message, no number is null."""
    name = value.WhichOneof("value")
    found: Any = getattr(value, name) if name else None
    if name == "object_value":
        return MessageToDict(found, preserving_proto_field_name=True)
    return None if isinstance(found, float) and not math.isfinite(found) else found


def _name(enum: Any, prefix: str, number: int) -> str | None:  # noqa: ANN401 - generated enum
    name: str = enum.Name(number)
    return name.removeprefix(prefix).lower() if number else None


def _text(data: bytes) -> str:
    """Model text as valid Unicode: what is not UTF-8 (lone surrogates) is shown escaped."""
    return data.decode("utf-8", "backslashreplace")
