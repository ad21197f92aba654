"""ListVertices: equality, ranges and prefixes over the meta columns; sorted; in pages.

Ids start with batch, group and sample, so a filter on any of them is a prefix within each agent's
table; the other fields are tested row by row. In the tables' own order a page reads on from the
last one. Any other order reads everything that the ids select, for every page, and keeps one page.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import AsyncIterator, Callable
from typing import Final, NamedTuple

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.vertex_order import rank
from flexmarl.core import store_keys as keys
from flexmarl.meg_store import wire
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.claims import is_claimable
from flexmarl.meg_store.database import Database
from flexmarl.meg_store.paging import PAGE_BYTES, Token, page_size, patient
from flexmarl.meg_store.runs import Runs

_MAX_SCANNED: Final = 20_000
_RANK: Final = struct.Struct(">q")

Test = Callable[[graph_pb2.VertexMeta], bool]


class _Ranked(NamedTuple):
    """A row in a sorted listing: by rank, ties by key."""

    rank: int
    key: bytes
    meta: bytes


class VertexListing:
    """Answers listings from applied rows only."""

    def __init__(self, database: Database, runs: Runs) -> None:
        self._database = database
        self._runs = runs

    async def page(self, request: pb.ListVerticesRequest) -> bytes:
        """Serialised `ListVerticesResponse`.

        A page may be short, even empty, while the token goes on: a filter that fits little is
        answered in bounded steps.

        Raises:
            DomainError: RUN_NOT_FOUND.
            ValueError: The token is of another query, or filter fields exclude each other.
        """
        required = self._runs.require(request.run_id).required
        tests = _tests(request.filter, required)
        order = bytes((request.order, request.descending))
        token = Token(request.run_id.encode() + request.filter.SerializeToString() + order)
        after = token.read(request.page_token)
        if request.order in (pb.VERTEX_ORDER_UNSPECIFIED, pb.VERTEX_ORDER_ID) and (
            not request.descending
        ):
            rows, position = await self._in_table_order(request, tests, after)
        else:
            rows, position = await self._sorted(request, tests, after)
        response = wire.vertices_response(rows)
        return response + wire.field(2, token.write(position)) if position else response

    async def _in_table_order(
        self, request: pb.ListVerticesRequest, tests: list[Test], after: bytes
    ) -> tuple[list[wire.Row], bytes]:
        limit = page_size(request.page_size)
        rows: list[wire.Row] = []
        size_bytes = scanned = 0
        async for key, value in self._candidates(request, after):
            scanned += 1
            if scanned > _MAX_SCANNED or len(rows) >= limit or size_bytes >= PAGE_BYTES:
                return rows, after
            after = key
            if tests and not _fits(graph_pb2.VertexMeta.FromString(value), tests):
                continue
            rows.append(self._row(request, key, value))
            size_bytes += _size(rows[-1])
        return rows, b""

    async def _sorted(
        self, request: pb.ListVerticesRequest, tests: list[Test], after: bytes
    ) -> tuple[list[wire.Row], bytes]:
        limit = page_size(request.page_size)
        last = (_RANK.unpack_from(after)[0], after[_RANK.size :]) if after else None
        best: list[_Ranked] = []
        async for key, value in self._candidates(request, b""):
            meta = graph_pb2.VertexMeta.FromString(value)
            if not _fits(meta, tests):
                continue
            place = _Ranked(rank(meta, request.order), key, value)
            if last is None or ((place[:2] < last) if request.descending else (place[:2] > last)):
                best.append(place)
            if len(best) > 4 * limit:
                best = sorted(best, reverse=request.descending)[: limit + 1]
        best = sorted(best, reverse=request.descending)[: limit + 1]
        rows: list[wire.Row] = []
        size_bytes = 0
        for place in best[:limit]:
            rows.append(self._row(request, place.key, place.meta))
            size_bytes += _size(rows[-1])
            if size_bytes >= PAGE_BYTES:
                break
        if len(rows) == len(best):
            return rows, b""
        delivered = best[len(rows) - 1]
        return rows, _RANK.pack(delivered.rank) + delivered.key

    async def _candidates(
        self, request: pb.ListVerticesRequest, after: bytes
    ) -> AsyncIterator[tuple[bytes, bytes]]:
        """Rows whose ids fit, by agent and id, after a key."""
        known = self._runs.require(request.run_id).agents
        wanted = request.filter.agent
        agents = sorted(known if not wanted else known & {wanted})
        for agent, stem in itertools.product(agents, _stems(request.filter)):
            prefix = keys.row(request.run_id, agent, stem)
            end = keys.after(prefix)
            if after >= end:
                continue
            start = max(prefix, after + b"\0") if after else prefix
            async for pair in patient(self._database.backend.scan(Table.ROWS, start, end)):
                yield pair

    def _row(self, request: pb.ListVerticesRequest, key: bytes, meta: bytes) -> wire.Row:
        payload = None
        if request.view == pb.VERTEX_VIEW_FULL:
            payload = self._database.get(Table.PAYLOADS, key)
        return meta, payload


def _size(row: wire.Row) -> int:
    meta, payload = row
    return len(meta) + len(payload or b"")


def _stems(chosen: pb.VertexFilter) -> list[str]:
    """What the ids of fitting vertices start with, in the order of the ids."""
    if chosen.group_ids and (chosen.group_id or chosen.sample_id):
        raise ValueError("filter: group_ids goes with neither group_id nor sample_id")
    if chosen.sample_id:
        stems = [f"{chosen.sample_id}/"]
    elif chosen.group_id:
        stems = [f"{chosen.group_id}-"]
    elif chosen.group_ids:
        stems = [f"{group_id}-" for group_id in sorted(set(chosen.group_ids))]
    else:
        stems = [batch_stem(chosen.batch if chosen.HasField("batch") else None)]
    wanted = chosen.id_prefix
    return [max(stem, wanted, key=len) for stem in stems if _agree(stem, wanted)]


def batch_stem(batch: int | None, *, evaluation: bool = False) -> str:
    """What the ids of a batch start with; of all batches: nothing."""
    # An evaluation's ids start with another letter: no list of a batch meets them.
    return "" if batch is None else f"{'e' if evaluation else 'b'}{batch:06d}a"


def _agree(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _fits(meta: graph_pb2.VertexMeta, tests: list[Test]) -> bool:
    return all(test(meta) for test in tests)


def _tests(chosen: pb.VertexFilter, required: tuple[str, ...]) -> list[Test]:
    """What of a filter the ids do not say."""
    tests: list[Test] = []
    for name in ("policy", "status", "void_reason", "kind", "micro_batch_id"):
        wanted = getattr(chosen, name)
        if wanted:
            tests.append(_equals(name, wanted))
    if chosen.HasField("batch") and (chosen.group_id or chosen.sample_id or chosen.group_ids):
        tests.append(lambda meta: meta.batch == chosen.batch)
    if chosen.group_id and chosen.sample_id:
        tests.append(lambda meta: meta.group_id == chosen.group_id)
    if chosen.HasField("min_version"):
        tests.append(lambda meta: meta.policy_version >= chosen.min_version)
    if chosen.HasField("max_version"):
        tests.append(lambda meta: meta.policy_version <= chosen.max_version)
    if chosen.HasField("min_reward"):
        tests.append(lambda meta: meta.HasField("reward") and meta.reward >= chosen.min_reward)
    if chosen.HasField("max_reward"):
        tests.append(lambda meta: meta.HasField("reward") and meta.reward <= chosen.max_reward)
    if chosen.finished_from_unix_ns:
        tests.append(lambda meta: meta.finished_unix_ns >= chosen.finished_from_unix_ns)
    if chosen.finished_before_unix_ns:
        tests.append(lambda meta: meta.finished_unix_ns < chosen.finished_before_unix_ns)
    if chosen.claimable:
        tests.append(lambda meta: is_claimable(meta, required))
    return tests


def _equals(name: str, wanted: object) -> Test:
    return lambda meta: bool(getattr(meta, name) == wanted)
