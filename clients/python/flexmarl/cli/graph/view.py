"""A stored sample as the drawings see it: nodes in topological order, short names, plain texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2, meg_store_pb2

Decode = Callable[[str, Sequence[int]], str]
"""Text of tokens under the tokenizer of a policy."""

_AGENT = common_pb2.VERTEX_KIND_AGENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One vertex.

    Attributes:
        path: Path of the call, its short name within the sample.
        title: Agent or tool.
        policy: Policy that served it; empty for tools.
        version: Version of the team it was sent under.
        prompt: What went in.
        output: What came out.
        status: "done", "failed", "cancelled".
        num_tokens: Sampled tokens.
        reward: Reward of the row.
        advantage: Advantage of the row.
        fate: "micro-batch <id>", "void <reason>", or empty.
        upstream: Paths of the vertices whose output it needed.
    """

    path: str
    title: str
    policy: str
    version: int
    prompt: str
    output: str
    status: str
    num_tokens: int
    reward: float | None
    advantage: float | None
    fate: str
    upstream: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As in the JSON drawing."""
        return {
            "path": self.path,
            "agent": self.title,
            "policy": self.policy,
            "version": self.version,
            "prompt": self.prompt,
            "output": self.output,
            "status": self.status,
            "num_tokens": self.num_tokens,
            "reward": self.reward,
            "advantage": self.advantage,
            "fate": self.fate,
            "upstream": list(self.upstream),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStep:
    """One call of the critical path; times in seconds.

    Attributes:
        path: Path of the call.
        title: Agent or tool.
        before_s: In the workflow's own code before the call.
        queued_s: Until it was sent to an instance.
        running_s: Until it finished.
    """

    path: str
    title: str
    before_s: float
    queued_s: float
    running_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.before_s + self.queued_s + self.running_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """One sample.

    Attributes:
        sample_id: Id.
        status: "done", "failed", ...
        query: The query, JSON.
        output: What the workflow returned, JSON.
        team_reward: Reward of the team.
        failure: Why it failed.
        nodes: Vertices in topological order.
        critical_path: Calls that its end waited for, in order; empty when it was not asked for.
    """

    sample_id: str
    status: str
    query: str
    output: str
    team_reward: float | None
    failure: str
    nodes: tuple[Node, ...]
    critical_path: tuple[PathStep, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As in the JSON drawing."""
        return {
            "sample_id": self.sample_id,
            "status": self.status,
            "query": _from_json(self.query),
            "output": _from_json(self.output),
            "team_reward": self.team_reward,
            "failure": self.failure,
            "vertices": [node.to_json() for node in self.nodes],
            "edges": [[source, node.path] for node in self.nodes for source in node.upstream],
            "critical_path": [asdict(step) for step in self.critical_path],
        }


def sample_view(
    sample: graph_pb2.Sample,
    vertices: Sequence[graph_pb2.Vertex],
    *,
    query_json: bytes,
    decode: Decode,
    critical_path: Iterable[meg_store_pb2.CriticalStep] = (),
) -> SampleView:
    """Reads a stored sample."""
    rewards = sample.rewards
    titles = {vertex.meta.vertex_id: vertex.meta.agent for vertex in vertices}
    return SampleView(
        sample_id=sample.sample_id,
        status=_enum(common_pb2.SampleStatus.Name(sample.status), "SAMPLE_STATUS_"),
        query=_text(query_json),
        output=_text(sample.output_json),
        team_reward=rewards.team if rewards.HasField("team") else None,
        failure=sample.failure.message,
        nodes=tuple(_node(vertex, decode) for vertex in vertices),
        critical_path=tuple(
            PathStep(
                path=step.vertex_id.partition("/")[2],
                title=titles.get(step.vertex_id, ""),
                before_s=step.before_ns / 1e9,
                queued_s=step.queued_ns / 1e9,
                running_s=step.running_ns / 1e9,
            )
            for step in critical_path
        ),
    )


def _node(vertex: graph_pb2.Vertex, decode: Decode) -> Node:
    meta, data = vertex.meta, vertex.payload
    agent = meta.kind == _AGENT
    return Node(
        path=meta.path,
        title=meta.agent,
        policy=meta.policy,
        version=meta.policy_version,
        prompt=decode(meta.policy, data.prompt_tokens) if agent else _text(data.tool_input),
        output=decode(meta.policy, data.response_tokens) if agent else _text(data.output),
        status=_enum(common_pb2.VertexStatus.Name(meta.status), "VERTEX_STATUS_"),
        num_tokens=meta.num_response_tokens,
        reward=meta.reward if meta.HasField("reward") else None,
        advantage=meta.advantage if meta.HasField("advantage") else None,
        fate=_fate(meta),
        upstream=tuple(vertex_id.partition("/")[2] for vertex_id in meta.upstream_vertex_ids),
    )


def _fate(meta: graph_pb2.VertexMeta) -> str:
    if meta.void_reason:
        return "void " + _enum(common_pb2.VoidReason.Name(meta.void_reason), "VOID_REASON_")
    return f"micro-batch {meta.micro_batch_id}" if meta.micro_batch_id else ""


def _enum(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _from_json(text: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return json.loads(text)
    except ValueError:
        return text
