"""Reads that follow edges: a sample's graph, a vertex's neighbours, statistics per agent.

Edges never leave a sample, so a sample is the most that any of them holds in memory.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import graph_rules
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.graph_shape import Call, GraphShape, critical_path, neighbourhood
from flexmarl.meg_store import wire
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Database
from flexmarl.meg_store.paging import patient
from flexmarl.meg_store.runs import Runs
from flexmarl.meg_store.vertex_listing import batch_stem

_MAX_HOPS = 1000
_MAX_CANDIDATES = 8


class GraphQueries:
    """Answers from applied rows only."""

    def __init__(self, database: Database, runs: Runs) -> None:
        self._database = database
        self._runs = runs

    async def sample_graph(self, request: pb.GetSampleGraphRequest) -> pb.GetSampleGraphResponse:
        """A sample, by id or by a prefix that fits one, with its vertices in topological order.

        Raises:
            DomainError: RUN_NOT_FOUND, NOT_FOUND.
            ValueError: The prefix fits several samples.
        """
        self._runs.require(request.run_id)
        sample = self._find_sample(request.run_id, request.sample_id)
        vertices = await self._vertices_of(request.run_id, sample.sample_id, request.view)
        response = pb.GetSampleGraphResponse(sample=sample, vertices=_in_order(vertices))
        if request.critical_path:
            calls = {name: call_of(vertex.meta) for name, vertex in vertices.items()}
            response.critical_path.extend(
                pb.CriticalStep(
                    vertex_id=step.vertex_id,
                    before_ns=step.before_ns,
                    queued_ns=step.queued_ns,
                    running_ns=step.running_ns,
                )
                for step in critical_path(calls, started_ns=sample.started_unix_ns)
            )
        return response

    async def neighbourhood(
        self, request: pb.GetNeighbourhoodRequest
    ) -> pb.GetNeighbourhoodResponse:
        """A vertex with those within some edges of it, in topological order.

        Raises:
            DomainError: RUN_NOT_FOUND, VERTEX_NOT_FOUND.
        """
        self._runs.require(request.run_id)
        sample_id = request.vertex_id.partition("/")[0]
        vertices = await self._vertices_of(request.run_id, sample_id, request.view)
        if request.vertex_id not in vertices:
            raise DomainError(
                ErrorReason.VERTEX_NOT_FOUND,
                f"no vertex {request.vertex_id!r} in run {request.run_id!r}",
                {"vertex": request.vertex_id},
            )
        near = neighbourhood(
            {name: vertex.meta.upstream_vertex_ids for name, vertex in vertices.items()},
            request.vertex_id,
            hops=min(request.hops or 1, _MAX_HOPS),
            upstream=request.direction != pb.EDGE_DIRECTION_DOWNSTREAM,
            downstream=request.direction != pb.EDGE_DIRECTION_UPSTREAM,
        )
        return pb.GetNeighbourhoodResponse(
            vertices=_in_order({name: vertices[name] for name in near})
        )

    async def describe_agents(self, request: pb.DescribeAgentsRequest) -> pb.DescribeAgentsResponse:
        """Counts per agent over the samples of a batch, or of all.

        Raises:
            DomainError: RUN_NOT_FOUND.
        """
        entry = self._runs.require(request.run_id)
        stem = batch_stem(request.batch if request.HasField("batch") else None)
        # Each agent's table is sorted by vertex id: merged, a sample's vertices come together.
        tables = [self._metas(request.run_id, agent, stem) for agent in sorted(entry.agents)]
        merged = heapq.merge(*tables, key=lambda pair: pair[0])
        shape = GraphShape()
        async for _, pairs in patient(
            itertools.groupby(merged, key=lambda pair: pair[0].partition("/")[0])
        ):
            shape.add({vertex_id: call_of(meta) for vertex_id, meta in pairs})
        return pb.DescribeAgentsResponse(
            num_samples=shape.num_samples,
            agents=[
                pb.AgentStatistics(
                    agent=name,
                    policy=agent.policy,
                    num_vertices=agent.num_vertices,
                    num_samples=agent.num_samples,
                    max_per_sample=agent.max_per_sample,
                    in_degree=agent.in_degree,
                    max_in_degree=agent.max_in_degree,
                    out_degree=agent.out_degree,
                    max_out_degree=agent.max_out_degree,
                    num_response_tokens=agent.num_response_tokens,
                    queued_ns=agent.queued_ns,
                    running_ns=agent.running_ns,
                    num_critical=agent.num_critical,
                )
                for name, agent in sorted(shape.agents.items())
            ],
        )

    def _metas(
        self, run_id: str, agent: str, stem: str
    ) -> Iterator[tuple[str, graph_pb2.VertexMeta]]:
        for _, value in self._database.scan(Table.ROWS, keys.row(run_id, agent, stem)):
            meta = graph_pb2.VertexMeta.FromString(value)
            yield meta.vertex_id, meta

    async def _vertices_of(
        self, run_id: str, sample_id: str, view: int
    ) -> dict[str, graph_pb2.Vertex]:
        vertices: dict[str, graph_pb2.Vertex] = {}
        for agent in sorted(self._runs.require(run_id).agents):
            prefix = keys.row(run_id, agent, sample_id + "/")
            async for key, value in patient(self._database.scan(Table.ROWS, prefix)):
                payload = None
                if view == pb.VERTEX_VIEW_FULL:
                    payload = self._database.get(Table.PAYLOADS, key)
                vertex = graph_pb2.Vertex.FromString(wire.vertex(value, payload))
                vertices[vertex.meta.vertex_id] = vertex
        return vertices

    def _find_sample(self, run_id: str, sample_id: str) -> graph_pb2.Sample:
        exact = self._database.get(Table.GRAPH, keys.join("sample", run_id, sample_id))
        if exact is not None:
            return graph_pb2.Sample.FromString(exact)
        prefix = keys.join("sample", run_id, sample_id)
        pairs = self._database.scan(Table.GRAPH, prefix)
        found = [
            graph_pb2.Sample.FromString(value)
            for (_, value), _ in zip(pairs, range(_MAX_CANDIDATES + 1), strict=False)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            names = [sample.sample_id for sample in found[:_MAX_CANDIDATES]]
            more = ", ..." if len(found) > _MAX_CANDIDATES else ""
            raise ValueError(
                f"sample {sample_id!r} fits several samples of run {run_id!r}: "
                f"{', '.join(names)}{more}"
            )
        raise DomainError(
            ErrorReason.NOT_FOUND,
            f"no sample {sample_id!r} in run {run_id!r}",
            {"sample": sample_id},
        )


def call_of(meta: graph_pb2.VertexMeta) -> Call:
    """A stored vertex as the shape of its graph sees it."""
    return Call(
        agent=meta.agent,
        policy=meta.policy,
        upstream=list(meta.upstream_vertex_ids),
        ready_ns=meta.ready_unix_ns,
        dispatched_ns=meta.dispatched_unix_ns,
        finished_ns=meta.finished_unix_ns,
        is_done=meta.status == common_pb2.VERTEX_STATUS_DONE,
        num_response_tokens=meta.num_response_tokens,
    )


def _in_order(vertices: dict[str, graph_pb2.Vertex]) -> list[graph_pb2.Vertex]:
    edges = {name: list(vertex.meta.upstream_vertex_ids) for name, vertex in vertices.items()}
    return [vertices[name] for name in graph_rules.topological_order(edges)]
