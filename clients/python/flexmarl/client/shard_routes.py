"""Where the store's calls go when a run has several shards, and how the answers become one.

A call that is not in `ROUTES` is the home shard's. A write that is split carries one request id to
all its shards: each of them knows its own part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client import shard_answers as answers

Request: TypeAlias = Any
"""A request of the contract."""
Response: TypeAlias = Any
"""A response of the contract."""
Merge: TypeAlias = Callable[[Mapping[str, Response]], Response]


class Shards(Protocol):
    """A run's shards that are not lost, as far as routes depend on them."""

    @property
    def names(self) -> Sequence[str]:
        """Their names, the home shard first."""
        ...

    def shard_of(self, row_id: str) -> str:
        """Shard of a group, sample or vertex, by its id."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """One call, as it is made.

    Attributes:
        parts: What each shard is asked.
        merge: Makes one answer of theirs, by shard.
        paged: Every shard is asked for all its pages.
    """

    parts: Mapping[str, Request]
    merge: Merge
    paged: bool = False


Route: TypeAlias = Callable[[Request, Shards], Plan]


def _write_graph(request: Request, shards: Shards) -> Plan:
    by_field = {
        "groups": answers.partition(request.groups, lambda g: shards.shard_of(g.group_id)),
        "samples": answers.partition(request.samples, lambda s: shards.shard_of(s.group_id)),
        "vertices": answers.partition(request.vertices, lambda v: shards.shard_of(v.meta.group_id)),
    }

    def merge(found: Mapping[str, Response]) -> Response:
        vertices = {name: response.vertex_outcomes for name, response in found.items()}
        samples = {name: response.sample_outcomes for name, response in found.items()}
        return pb.WriteGraphResponse(
            vertex_outcomes=by_field["vertices"].in_order(vertices),
            sample_outcomes=by_field["samples"].in_order(samples),
        )

    return Plan(_parts(request, by_field), merge)


def _get_vertices(request: Request, shards: Shards) -> Plan:
    rows = answers.partition(request.rows, partial(_shard_of_ref, shards))

    def merge(found: Mapping[str, Response]) -> Response:
        vertices = {name: response.vertices for name, response in found.items()}
        return pb.GetVerticesResponse(vertices=rows.in_order(vertices))

    return Plan(_parts(request, {"rows": rows}), merge)


def _split(
    field: str, shard_of: Callable[[Shards, Any], str], response: Callable[[], Response]
) -> Route:
    """Every item goes to its shard; there is nothing to answer."""

    def route(request: Request, shards: Shards) -> Plan:
        items = answers.partition(getattr(request, field), partial(shard_of, shards))
        return Plan(_parts(request, {field: items}), lambda _: response())

    return route


def _everywhere(merge: Callable[[Request, Iterable[Response]], Response]) -> Route:
    """Every shard is asked the same."""

    def route(request: Request, shards: Shards) -> Plan:
        parts = dict.fromkeys(shards.names, request)
        return Plan(parts, lambda found: merge(request, found.values()))

    return route


def _sorted_pages(field: str, row_id: str) -> Route:
    """The rows of all shards, or of a group's, by id."""

    def route(request: Request, shards: Shards) -> Plan:
        group_id = getattr(request, "group_id", "")
        names = [shards.shard_of(group_id)] if group_id else shards.names

        def merge(found: Mapping[str, Response]) -> Response:
            merged = type(next(iter(found.values())))()
            rows = (getattr(response, field) for response in found.values())
            getattr(merged, field).extend(
                answers.sorted_rows(rows, key=lambda row: str(getattr(row, row_id)))
            )
            return merged

        return Plan(dict.fromkeys(names, request), merge, paged=True)

    return route


def _neighbourhood(request: Request, shards: Shards) -> Plan:
    """Edges stay within a sample, and so on its shard."""
    name = shards.shard_of(request.vertex_id)
    return Plan({name: request}, lambda found: found[name])


def _parts(request: Request, by_field: Mapping[str, answers.Parts[Any]]) -> dict[str, Request]:
    """The request for each shard that has items: its own ones, and all else."""
    kept = {f.name: value for f, value in request.ListFields() if f.name not in by_field}
    names = {name: None for items in by_field.values() for name in items.shards}
    return {
        name: type(request)(**kept, **{field: items[name] for field, items in by_field.items()})
        for name in names
    }


def _shard_of_ref(shards: Shards, ref: common_pb2.VertexRef) -> str:
    return ref.shard or shards.shard_of(ref.vertex_id)


def _shard_of_row(shards: Shards, item: pb.VoidedRow | pb.ColumnWrite) -> str:
    return _shard_of_ref(shards, item.row)


def _shard_of_closure(shards: Shards, closure: pb.GroupClosure) -> str:
    return shards.shard_of(closure.group_id)


ROUTES: Final[Mapping[str, Route]] = {
    "WriteGraph": _write_graph,
    "CloseGroups": _split("closures", _shard_of_closure, pb.CloseGroupsResponse),
    "VoidRows": _split("rows", _shard_of_row, pb.VoidRowsResponse),
    "WriteColumns": _split("writes", _shard_of_row, pb.WriteColumnsResponse),
    "MarkRows": _split("rows", _shard_of_ref, pb.MarkRowsResponse),
    "CloseSubgraph": _everywhere(lambda _, found: next(iter(found))),
    "GetVertices": _get_vertices,
    "ListClaimable": _everywhere(
        lambda request, found: answers.oldest_claimable(
            found, max_rows=request.max_rows, max_tokens=request.max_tokens
        )
    ),
    "ListSamples": _sorted_pages("samples", "sample_id"),
    "ListGroups": _sorted_pages("groups", "group_id"),
    "GetNeighbourhood": _neighbourhood,
    "DescribeAgents": _everywhere(lambda _, found: answers.sum_agents(found)),
    "CountVertices": _everywhere(lambda _, found: answers.sum_counts(found)),
}
"""Routes by the name of the call."""
