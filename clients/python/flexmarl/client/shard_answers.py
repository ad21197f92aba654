"""Rows split by shard, and answers of shards put together: in order, by id, as a sum."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core.errors import DomainError, ErrorReason

T = TypeVar("T")
ResultT = TypeVar("ResultT")


class Parts(Generic[T]):
    """Items by shard, and the way back to the order that they came in."""

    def __init__(self) -> None:
        self._items: dict[str, list[T]] = {}
        self._order: list[str] = []

    def add(self, shard: str, item: T) -> None:
        """Add the next item."""
        self._items.setdefault(shard, []).append(item)
        self._order.append(shard)

    @property
    def shards(self) -> Sequence[str]:
        """Shards that have items."""
        return tuple(self._items)

    def __contains__(self, shard: str) -> bool:
        return shard in self._items

    def __getitem__(self, shard: str) -> list[T]:
        """Items of a shard, in order; maybe none."""
        return self._items.get(shard, [])

    def in_order(self, results: Mapping[str, Iterable[ResultT]]) -> list[ResultT]:
        """One result per item, from each shard's results, in the order of the items."""
        iterators: dict[str, Iterator[ResultT]] = {k: iter(v) for k, v in results.items()}
        return [next(iterators[shard]) for shard in self._order]


def partition(items: Iterable[T], shard_of: Callable[[T], str]) -> Parts[T]:
    """Items by shard."""
    parts = Parts[T]()
    for item in items:
        parts.add(shard_of(item), item)
    return parts


def split_filter(
    chosen: pb.VertexFilter, shards: Iterable[str], shard_of: Callable[[str], str]
) -> dict[str, pb.VertexFilter]:
    """What each shard that can have fitting vertices is asked for."""
    one_group = chosen.sample_id or chosen.group_id
    if one_group:
        return {shard_of(one_group): chosen}
    if not chosen.group_ids:
        return dict.fromkeys(shards, chosen)
    parts = partition(chosen.group_ids, shard_of)
    split: dict[str, pb.VertexFilter] = {}
    for shard in parts.shards:
        split[shard] = pb.VertexFilter()
        split[shard].CopyFrom(chosen)
        del split[shard].group_ids[:]
        split[shard].group_ids.extend(parts[shard])
    return split


def sorted_rows(answers: Iterable[Iterable[T]], *, key: Callable[[T], str]) -> list[T]:
    """The rows of all shards, by id."""
    return sorted((row for rows in answers for row in rows), key=key)


async def merge_sorted(
    streams: Sequence[AsyncIterator[T]], *, key: Callable[[T], Any], descending: bool = False
) -> AsyncIterator[T]:
    """The items of streams that are sorted, sorted; one item of each stream is held."""
    heads = [(stream, await anext(stream, None)) for stream in streams]
    choose = max if descending else min
    while waiting := [(stream, head) for stream, head in heads if head is not None]:
        chosen, item = choose(waiting, key=lambda pair: key(pair[1]))
        yield item
        heads = [
            (stream, await anext(stream, None) if stream is chosen else head)
            for stream, head in waiting
        ]


def oldest_claimable(
    found: Iterable[pb.ListClaimableResponse], *, max_rows: int, max_tokens: int
) -> pb.ListClaimableResponse:
    """The claimable rows of all shards by vertex id, within the bounds; 0 means any number."""
    answers = list(found)
    rows = sorted((row for a in answers for row in a.rows), key=lambda row: row.row.vertex_id)
    # What comes after the last row of a shard that has more is not known yet.
    ends = [a.rows[-1].row.vertex_id for a in answers if a.more and a.rows]
    known = [row for row in rows if not ends or row.row.vertex_id <= min(ends)]
    taken: list[pb.ClaimableRow] = []
    num_tokens = 0
    for row in known:
        num_tokens += row.num_tokens
        if len(taken) == (max_rows or len(known)) or (taken and 0 < max_tokens < num_tokens):
            break
        taken.append(row)
    return pb.ListClaimableResponse(rows=taken, more=bool(ends) or len(taken) < len(rows))


def sum_agents(parts: Iterable[pb.DescribeAgentsResponse]) -> pb.DescribeAgentsResponse:
    """Statistics over all shards: a sample is on one, so sums add up."""
    total = pb.DescribeAgentsResponse()
    by_name: dict[tuple[str, str], pb.AgentStatistics] = {}
    for part in parts:
        total.num_samples += part.num_samples
        for agent in part.agents:
            key = (agent.agent, agent.policy)
            known = by_name.setdefault(key, pb.AgentStatistics(agent=key[0], policy=key[1]))
            for field, value in agent.ListFields():
                if isinstance(value, int):
                    old = getattr(known, field.name)
                    largest = field.name.startswith("max_")
                    setattr(known, field.name, max(old, value) if largest else old + value)
    total.agents.extend(by_name[key] for key in sorted(by_name))
    return total


def the_only(
    found: Iterable[pb.GetSampleGraphResponse | None], *, sample_id: str, run_id: str
) -> pb.GetSampleGraphResponse:
    """The one sample that a prefix fits on any shard.

    Raises:
        DomainError: NOT_FOUND, or INVALID_ARGUMENT where it fits several.
    """
    graphs = [graph for graph in found if graph is not None]
    if len(graphs) == 1:
        return graphs[0]
    if graphs:
        names = ", ".join(sorted(graph.sample.sample_id for graph in graphs))
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            f"sample {sample_id!r} fits several samples of run {run_id!r}: {names}",
        )
    raise DomainError(
        ErrorReason.NOT_FOUND,
        f"no sample {sample_id!r} in run {run_id!r}",
        {"sample": sample_id},
    )


def sum_counts(counts: Iterable[pb.CountVerticesResponse]) -> pb.CountVerticesResponse:
    """The account over all shards."""
    total = pb.CountVerticesResponse()
    for each in counts:
        total.open_rows.extend(each.open_rows)
        for policy, part in each.policies.items():
            sums = total.policies[policy]
            sums.finished += part.finished
            sums.consumed += part.consumed
            sums.untrained += part.untrained
            sums.cancelled += part.cancelled
            for reason, number in part.voided.items():
                sums.voided[reason] += number
    return total
