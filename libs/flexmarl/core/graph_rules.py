"""What may be written into the stored graph, and what becomes of late results.

The store keeps ended vertices only, and ended states are final: whatever comes after the first
accepted result is a duplicate, kept for people and never used (I3). A row moves released -> marked,
or to void; a void row keeps its first reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import SampleId, VertexId
from flexmarl.core.states import GROUP, SAMPLE, VERTEX, GroupStatus, SampleStatus, VertexStatus


class WriteOutcome(StrEnum):
    """What became of one written row."""

    ACCEPTED = "accepted"
    UNCHANGED = "unchanged"
    DUPLICATE = "duplicate"
    SUBGRAPH_CLOSED = "subgraph_closed"


@lru_cache(maxsize=65536)
def _check_path(path: str) -> None:
    # The sample does not matter to the path's syntax.
    VertexId(_ANY_SAMPLE, path)


_ANY_SAMPLE = SampleId.parse("b000000a0-g0000-s000a0")


@lru_cache(maxsize=65536)
def _stated_by(sample_id: str) -> tuple[tuple[str, int, int, int], int]:
    """What the rows of a sample must say, and its ordinal: every vertex of it repeats its id."""
    parsed = SampleId.parse(sample_id)
    group = parsed.group
    stated = (str(group), group.batch.batch, group.batch.attempt, parsed.attempt)
    return stated, parsed.ordinal


def check_sample_ids(
    *, sample_id: str, group_id: str, batch: int, batch_attempt: int, sample_attempt: int
) -> None:
    """Checks that the bare ids of a row say what its sample id says.

    Raises:
        ValueError: They do not.
    """
    if (group_id, batch, batch_attempt, sample_attempt) != _stated_by(sample_id)[0]:
        raise ValueError(f"sample id {sample_id!r} does not agree with the row's other ids")


def check_sample_ordinal(*, sample_id: str, ordinal: int) -> None:
    """Checks that a sample's ordinal is that of its id.

    Raises:
        ValueError: It is not.
    """
    if ordinal != _stated_by(sample_id)[1]:
        raise ValueError(f"sample {sample_id!r}: its ordinal is another")


def check_vertex_ids(
    vertex_ids: Sequence[str], *, sample_ids: Sequence[str], paths: Sequence[str]
) -> None:
    """Checks that each vertex id is its sample's id and its path.

    Raises:
        ValueError: One is not.
    """
    for path in paths:
        _check_path(path)
    for vertex_id, sample_id, path in zip(vertex_ids, sample_ids, paths, strict=True):
        if vertex_id != f"{sample_id}/{path}":
            raise ValueError(f"vertex id {vertex_id!r} is not {sample_id!r}, '/', {path!r}")


def check_ended(vertex_id: str, status: VertexStatus) -> None:
    """Checks that a vertex has ended: only such vertices are stored.

    Raises:
        DomainError: INVALID_ARGUMENT.
    """
    if not VERTEX.is_terminal(status):
        raise _invalid(f"vertex {vertex_id!r}: {status} has not ended, only ended ones are stored")


def decide_vertex(*, known: bool, same: bool, late: bool, subgraph_closed: bool) -> WriteOutcome:
    """Decides over one written vertex.

    Args:
        known: A row of this id is stored.
        same: Its content is the same.
        late: Its sample or group has ended already.
        subgraph_closed: Its (batch, policy) is closed: a row that is new there is not taken, and
            spares the other rows of its call.
    """
    if known:
        return WriteOutcome.UNCHANGED if same else WriteOutcome.DUPLICATE
    if late:
        return WriteOutcome.DUPLICATE
    return WriteOutcome.SUBGRAPH_CLOSED if subgraph_closed else WriteOutcome.ACCEPTED


def decide_sample(
    *, known: SampleStatus | None, new: SampleStatus, same: bool, group_open: bool
) -> WriteOutcome:
    """Decides over one written sample; an ended one, or one of an ended group, is final."""
    if known is not None and same:
        return WriteOutcome.UNCHANGED
    if not group_open or (known is not None and SAMPLE.is_terminal(known)):
        return WriteOutcome.DUPLICATE
    assert known is None or known is new or SAMPLE.allows(known, new)
    return WriteOutcome.ACCEPTED


def ends_cancelled(*, known: SampleStatus | None, new: SampleStatus, group_open: bool) -> bool:
    """Whether a sample's end came after that of its group, which was decided without it.

    The end is late; the sample, which is still open in the store, ends as cancelled.
    """
    return known is SampleStatus.OPEN and SAMPLE.is_terminal(new) and not group_open


def decide_closure(group_id: str, *, known: GroupStatus, new: GroupStatus) -> WriteOutcome:
    """Decides over the end of a group; the same end again is UNCHANGED (its rows are compared).

    Raises:
        DomainError: STATE_TRANSITION_REFUSED.
    """
    if known is new and GROUP.is_terminal(known):
        return WriteOutcome.UNCHANGED
    if not GROUP.allows(known, new):
        raise DomainError(
            ErrorReason.STATE_TRANSITION_REFUSED,
            f"group {group_id!r} is {known}; it cannot become {new}",
            {"group": group_id, "status": known.value},
        )
    return WriteOutcome.ACCEPTED


def decide_release(
    vertex_id: str,
    *,
    status: VertexStatus,
    trainable: bool,
    is_void: bool,
    stored: tuple[float, float] | None,
    reward: float,
    advantage: float,
) -> WriteOutcome:
    """Decides over the release of one row.

    Args:
        vertex_id: For messages.
        status: State of the vertex.
        trainable: Its policy is trained.
        is_void: It has a void reason.
        stored: Reward and advantage that it was released with before.
        reward: New reward.
        advantage: New advantage.

    Raises:
        DomainError: REWARD_INVALID for numbers that are not finite, STATE_TRANSITION_REFUSED for a
            row that cannot be trained on or was released with other numbers.
    """
    if not (math.isfinite(reward) and math.isfinite(advantage)):
        raise DomainError(
            ErrorReason.REWARD_INVALID,
            f"row {vertex_id!r}: reward {reward} and advantage {advantage} must be finite",
            {"vertex": vertex_id},
        )
    if status is not VertexStatus.DONE or not trainable or is_void:
        raise _refused(vertex_id, "is not a finished, trainable row without void reason")
    if stored is None:
        return WriteOutcome.ACCEPTED
    if stored != (reward, advantage):
        raise _refused(vertex_id, "was released with another reward or advantage")
    return WriteOutcome.UNCHANGED


def check_claim(
    vertex_id: str, *, released: bool, is_void: bool, owner: str | None, micro_batch_id: str
) -> None:
    """Checks that a micro-batch record may name a row: it is released and nobody else's.

    Raises:
        DomainError: ROW_ALREADY_MARKED, or STATE_TRANSITION_REFUSED.
    """
    check_owner(vertex_id, owner=owner, micro_batch_id=micro_batch_id)
    if not released or is_void:
        why = "is void" if is_void else "is not released, or lacks a required column"
        raise _refused(vertex_id, why)


def check_owner(vertex_id: str, *, owner: str | None, micro_batch_id: str) -> None:
    """Checks that no other micro-batch has the row.

    Raises:
        DomainError: ROW_ALREADY_MARKED.
    """
    if owner is not None and owner != micro_batch_id:
        raise DomainError(
            ErrorReason.ROW_ALREADY_MARKED,
            f"row {vertex_id!r} belongs to micro-batch {owner!r}",
            {"vertex": vertex_id, "micro_batch": owner},
        )


def check_edges(new: Mapping[str, Sequence[str]], *, is_stored: Callable[[str], bool]) -> None:
    """Checks the edges into new vertices of any samples.

    Args:
        new: Upstream vertex ids by vertex id.
        is_stored: Whether a vertex was written before.

    Raises:
        DomainError: INVALID_ARGUMENT for an edge from nowhere, from another sample, or a cycle.
    """
    if not any(new.values()):
        return
    seen: set[str] = set()
    in_order = True
    for vertex_id, upstreams in new.items():
        sample_id = vertex_id.partition("/")[0] if upstreams else ""
        for upstream in upstreams:
            if upstream.partition("/")[0] != sample_id:
                raise _invalid(f"edge {upstream!r} -> {vertex_id!r} leaves the sample")
            if upstream in new:
                in_order = in_order and upstream in seen
            elif not is_stored(upstream):
                raise _invalid(f"edge {upstream!r} -> {vertex_id!r} comes from no stored vertex")
        seen.add(vertex_id)
    if not in_order:  # where every upstream comes first there is no cycle
        topological_order(new)


def topological_order(edges: Mapping[str, Sequence[str]]) -> list[str]:
    """Vertex ids so that every upstream comes first; ties in id order.

    Args:
        edges: Upstream vertex ids by vertex id; unknown upstreams are not waited for.

    Raises:
        DomainError: INVALID_ARGUMENT for a cycle.
    """
    waiting = {v: sum(1 for u in set(ups) if u in edges) for v, ups in edges.items()}
    downstream: dict[str, list[str]] = {}
    for vertex_id in sorted(edges):
        for upstream in sorted(set(edges[vertex_id])):
            downstream.setdefault(upstream, []).append(vertex_id)
    layer = sorted(v for v, count in waiting.items() if count == 0)
    order: list[str] = []
    while layer:
        order.extend(layer)
        layer = sorted(_newly_ready(layer, downstream, waiting))
    if len(order) < len(edges):
        stuck = min(set(edges) - set(order))
        raise _invalid(f"vertex {stuck!r} is its own upstream, over one or more edges")
    return order


def _newly_ready(
    finished: Iterable[str], downstream: Mapping[str, Sequence[str]], waiting: dict[str, int]
) -> list[str]:
    ready: list[str] = []
    for upstream in finished:
        for vertex_id in downstream.get(upstream, ()):
            waiting[vertex_id] -= 1
            if waiting[vertex_id] == 0:
                ready.append(vertex_id)
    return ready


def _invalid(message: str) -> DomainError:
    return DomainError(ErrorReason.INVALID_ARGUMENT, message)


def _refused(vertex_id: str, why: str) -> DomainError:
    return DomainError(
        ErrorReason.STATE_TRANSITION_REFUSED, f"row {vertex_id!r} {why}", {"vertex": vertex_id}
    )
