"""The tables of an exported run: names, types and meaning of their columns.

docs/trajectories.md is generated from `TABLES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class ColumnKind(StrEnum):
    """Type of a column; the value is the name that the documents use."""

    TEXT = "string"
    INTEGER = "int64"
    NUMBER = "double"
    FLAG = "boolean"
    TOKENS = "list<uint32>"
    NUMBERS = "list<double>"
    BY_NAME = "map<string, double>"


@dataclass(frozen=True, slots=True)
class TrajectoryColumn:
    """One column; any value may be null where its meaning says so."""

    name: str
    kind: ColumnKind
    meaning: str


_K = ColumnKind
_C = TrajectoryColumn

_PLACE: Final = (
    _C("run_id", _K.TEXT, "Run."),
    _C("batch", _K.INTEGER, "Batch that admitted the group; its commit made version batch + 1."),
    _C("batch_attempt", _K.INTEGER, "Attempt of the batch; 0 unless it was rolled back."),
)

TABLES: Final[Mapping[str, tuple[TrajectoryColumn, ...]]] = MappingProxyType(
    {
        "groups": (
            *_PLACE,
            _C("group_id", _K.TEXT, "Group: the samples of one query."),
            _C("ordinal", _K.INTEGER, "Position in the batch, replacements counted on."),
            _C("query_index", _K.INTEGER, "Row of the dataset, after shuffling."),
            _C("query_json", _K.TEXT, "The query, a JSON object."),
            _C("num_samples", _K.INTEGER, "Samples wanted."),
            _C("status", _K.TEXT, "open, closed or dropped."),
            _C("drop_reason", _K.TEXT, "Why it was dropped, else null."),
            _C("opened_unix_ns", _K.INTEGER, "Time of admission."),
            _C("closed_unix_ns", _K.INTEGER, "Time of closure, null while open."),
        ),
        "samples": (
            *_PLACE,
            _C("group_id", _K.TEXT, "Its group."),
            _C("sample_id", _K.TEXT, "Sample: one attempt at one execution of the workflow."),
            _C("ordinal", _K.INTEGER, "Ordinal in the group."),
            _C("sample_attempt", _K.INTEGER, "Attempt of the sample."),
            _C("status", _K.TEXT, "open, done, failed, cancelled or superseded."),
            _C("team_reward", _K.NUMBER, "Reward of the whole team, null without one."),
            _C("agent_rewards", _K.BY_NAME, "Reward per agent."),
            _C("vertex_rewards", _K.BY_NAME, "Reward per vertex id."),
            _C("metrics", _K.BY_NAME, "Further numbers of the reward function."),
            _C("output_json", _K.TEXT, "What the workflow returned, JSON."),
            _C("num_vertices", _K.INTEGER, "Finished vertices, tools included."),
            _C("failure", _K.TEXT, "Why it failed, else null."),
            _C("started_unix_ns", _K.INTEGER, "Start of the workflow."),
            _C("finished_unix_ns", _K.INTEGER, "Its end, null while open."),
        ),
        "vertices": (
            *_PLACE,
            _C("group_id", _K.TEXT, "Its group."),
            _C("sample_id", _K.TEXT, "Its sample."),
            _C("vertex_id", _K.TEXT, "Vertex: sample id, '/', path of the call."),
            _C("path", _K.TEXT, "Path of the call in its sample: the call site."),
            _C("agent", _K.TEXT, "Agent, or name of the tool."),
            _C("policy", _K.TEXT, "Policy that served it, null for tools."),
            _C("kind", _K.TEXT, "agent, tool or environment."),
            _C("status", _K.TEXT, "done, failed or cancelled."),
            _C("attempt", _K.INTEGER, "Attempt that ended it, from 1."),
            _C("policy_version", _K.INTEGER, "Version that its request was sent under."),
            _C("weights_hash", _K.TEXT, "Content hash of the weights that served it."),
            _C("trainable", _K.FLAG, "Its policy is trained: it ends consumed or void."),
            _C("reward", _K.NUMBER, "Reward of the row, null before its group closes."),
            _C("advantage", _K.NUMBER, "Advantage of the row, null unless it was released."),
            _C("void_reason", _K.TEXT, "Why it is not trained on, else null."),
            _C("micro_batch_id", _K.TEXT, "Micro-batch that marked it, else null."),
            _C("consumed_by_version", _K.INTEGER, "Version whose update contains it, else null."),
            _C("prompt_tokens", _K.TOKENS, "Prompt as the engine saw it; null for tools."),
            _C("response_tokens", _K.TOKENS, "Sampled tokens, the end token included."),
            _C("logprobs", _K.NUMBERS, "Behaviour log-probability of each sampled token."),
            _C("temperature", _K.NUMBER, "Sampling temperature."),
            _C("input_text", _K.TEXT, "Text of the prompt; of a tool its input, JSON."),
            _C("output_text", _K.TEXT, "Text of the response; of a tool its answer, JSON."),
            _C("num_prompt_tokens", _K.INTEGER, "Prompt tokens."),
            _C("num_response_tokens", _K.INTEGER, "Sampled tokens."),
            _C("finish_reason", _K.TEXT, "stop, length, abort or tool."),
            _C("instance_id", _K.TEXT, "Instance that served it."),
            _C("columns_json", _K.TEXT, "Values of declared columns, a JSON object."),
            _C("failure", _K.TEXT, "Why it failed, else null."),
            _C("ready_unix_ns", _K.INTEGER, "Call made."),
            _C("dispatched_unix_ns", _K.INTEGER, "Sent to its instance, null if it never was."),
            _C("finished_unix_ns", _K.INTEGER, "Ended."),
        ),
        "edges": (
            _C("run_id", _K.TEXT, "Run."),
            _C("sample_id", _K.TEXT, "Sample of both ends."),
            _C("upstream_vertex_id", _K.TEXT, "Vertex whose output was needed."),
            _C("vertex_id", _K.TEXT, "Vertex that needed it."),
        ),
    }
)
"""Columns by name of the table, in the order of the files."""
