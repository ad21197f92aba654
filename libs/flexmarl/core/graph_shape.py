"""The shape of a sample's graph: neighbours, critical path, degrees.

The three causes of slow multi-agent training are properties of this graph: skew is its degrees per
agent, the long tail its critical path, sparse training which agents it reaches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One vertex, as far as the shape of its graph goes.

    Attributes:
        agent: Agent or tool.
        policy: Policy; empty for tools.
        upstream: Ids of the vertices whose output it needed.
        ready_ns: Call made, Unix nanoseconds.
        dispatched_ns: Sent to an instance; 0 if it never was.
        finished_ns: Ended.
        is_done: It ended with a result, rather than cut or failed.
        num_response_tokens: Sampled tokens.
    """

    agent: str
    policy: str
    upstream: Sequence[str]
    ready_ns: int
    dispatched_ns: int
    finished_ns: int
    is_done: bool
    num_response_tokens: int

    @property
    def queued_ns(self) -> int:
        """Time from the call until it was sent, or until it ended unsent; nanoseconds."""
        return max(0, (self.dispatched_ns or self.finished_ns) - self.ready_ns)

    @property
    def running_ns(self) -> int:
        """Time from being sent until the end, nanoseconds."""
        return max(0, self.finished_ns - self.dispatched_ns) if self.dispatched_ns else 0


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a critical path.

    Attributes:
        vertex_id: The vertex.
        before_ns: Time in the workflow's own code before the call was made.
        queued_ns: Time until it was sent to an instance.
        running_ns: Time until it finished.
    """

    vertex_id: str
    before_ns: int
    queued_ns: int
    running_ns: int


def neighbourhood(
    edges: Mapping[str, Collection[str]], start: str, *, hops: int, upstream: bool, downstream: bool
) -> set[str]:
    """Vertices within some edges of one, itself included.

    Args:
        edges: Upstream vertex ids by vertex id.
        start: Where to begin.
        hops: Edges to follow, each way.
        upstream: Follow edges to what a vertex needed.
        downstream: Follow edges to what needed a vertex. Ways are not mixed: what else an upstream
            vertex was needed for is no neighbour.
    """
    found = {start}
    if upstream:
        found |= _walk(edges, start, hops)
    if downstream:
        back: dict[str, set[str]] = {}
        for vertex_id, needed in edges.items():
            for upstream_id in needed:
                back.setdefault(upstream_id, set()).add(vertex_id)
        found |= _walk(back, start, hops)
    return found & set(edges)


def _walk(edges: Mapping[str, Collection[str]], start: str, hops: int) -> set[str]:
    found, frontier = {start}, {start}
    for _ in range(hops):
        frontier = {after for vertex_id in frontier for after in edges.get(vertex_id, ())} - found
        if not frontier:
            break
        found |= frontier
    return found


def critical_path(calls: Mapping[str, Call], *, started_ns: int) -> list[Step]:
    """The chain of calls that a sample's end waited for, by the times that were measured.

    Its last call is the one that ended last among those with a result (a call that was cut held
    nobody up); the one before it is, each time, the upstream that finished last.

    Args:
        calls: By vertex id; free of cycles.
        started_ns: Start of the workflow, Unix nanoseconds; 0 if it is not known.
    """
    ended = [v for v, call in calls.items() if call.is_done] or list(calls)
    if not ended:
        return []

    def finished(vertex_id: str) -> tuple[int, str]:
        return calls[vertex_id].finished_ns, vertex_id

    chain = [max(ended, key=finished)]
    while upstream := [v for v in calls[chain[-1]].upstream if v in calls]:
        chain.append(max(upstream, key=finished))
    steps: list[Step] = []
    free_ns = started_ns or calls[chain[-1]].ready_ns
    for vertex_id in reversed(chain):
        call = calls[vertex_id]
        before_ns = max(0, call.ready_ns - free_ns)
        steps.append(Step(vertex_id, before_ns, call.queued_ns, call.running_ns))
        free_ns = call.finished_ns
    return steps


@dataclass(slots=True)
class AgentShape:
    """Sums over one agent's vertices; those of several shards or batches add up.

    Attributes:
        policy: Its policy; empty for tools.
        num_vertices: Vertices, cut and failed ones included.
        num_samples: Samples that have one.
        max_per_sample: Most vertices in one sample.
        in_degree: Edges into its vertices.
        max_in_degree: Most edges into one.
        out_degree: Edges out of its vertices.
        max_out_degree: Most edges out of one.
        num_response_tokens: Sampled tokens.
        queued_ns: Time from calls until they were sent, nanoseconds.
        running_ns: Time from there until they ended, nanoseconds.
        num_critical: Times that a vertex was on the critical path of its sample.
    """

    policy: str = ""
    num_vertices: int = 0
    num_samples: int = 0
    max_per_sample: int = 0
    in_degree: int = 0
    max_in_degree: int = 0
    out_degree: int = 0
    max_out_degree: int = 0
    num_response_tokens: int = 0
    queued_ns: int = 0
    running_ns: int = 0
    num_critical: int = 0


class GraphShape:
    """Adds up the shapes of samples, per agent."""

    def __init__(self) -> None:
        self.agents: dict[str, AgentShape] = {}
        self.num_samples = 0

    def add(self, calls: Mapping[str, Call]) -> None:
        """Add one sample's vertices, by id."""
        self.num_samples += 1
        out_degrees = dict.fromkeys(calls, 0)
        for call in calls.values():
            for upstream in set(call.upstream) & set(out_degrees):
                out_degrees[upstream] += 1
        in_sample: dict[str, int] = {}
        for vertex_id, call in calls.items():
            agent = self.agents.setdefault(call.agent, AgentShape())
            in_sample[call.agent] = in_sample.get(call.agent, 0) + 1
            self._count(agent, call, out_degree=out_degrees[vertex_id])
        for name, number in in_sample.items():
            agent = self.agents[name]
            agent.num_samples += 1
            agent.max_per_sample = max(agent.max_per_sample, number)
        for step in critical_path(calls, started_ns=0):
            self.agents[calls[step.vertex_id].agent].num_critical += 1

    def _count(self, agent: AgentShape, call: Call, *, out_degree: int) -> None:
        in_degree = len(set(call.upstream))
        agent.policy = call.policy
        agent.num_vertices += 1
        agent.in_degree += in_degree
        agent.max_in_degree = max(agent.max_in_degree, in_degree)
        agent.out_degree += out_degree
        agent.max_out_degree = max(agent.max_out_degree, out_degree)
        agent.num_response_tokens += call.num_response_tokens
        agent.queued_ns += call.queued_ns
        agent.running_ns += call.running_ns
