"""Reads of the graph: by reference, by filter, by sample, and the account of a batch.

Ids start with batch, group and sample, so a filter on any of them is a prefix within each agent's
table. Long scans give the event loop back every few hundred rows.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.meg_store.v1alpha1 import graph_pb2
from flexmarl.api.meg_store.v1alpha1 import meg_store_pb2 as pb
from flexmarl.client.enums import VERTEX_STATUS, VOID_REASON
from flexmarl.core import graph_rules
from flexmarl.core import store_keys as keys
from flexmarl.core.batch_account import BatchAccount
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import BatchId
from flexmarl.core.keepalive import MAX_MESSAGE_BYTES
from flexmarl.meg_store import wire
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.claims import Claims
from flexmarl.meg_store.database import Database
from flexmarl.meg_store.rows import is_claimable, vertex_not_found
from flexmarl.meg_store.runs import Runs

DEFAULT_PAGE = 1000
MAX_PAGE = 10_000
_PAGE_BYTES = MAX_MESSAGE_BYTES // 2
_YIELD_EVERY = 256
_MAX_SCANNED = 20_000


class Queries:
    """Answers reads from applied rows only."""

    def __init__(self, database: Database, runs: Runs, claims: Claims, *, shard: str) -> None:
        self._database = database
        self._runs = runs
        self._claims = claims
        self._shard = shard

    def get_vertices(self, request: pb.GetVerticesRequest) -> bytes:
        """Serialised `GetVerticesResponse` of rows in the order asked for.

        Raises:
            DomainError: RUN_NOT_FOUND, VERTEX_NOT_FOUND, MESSAGE_TOO_LARGE.
        """
        run_id = self._runs.require(request.run_id).run_id
        refs = list(request.rows)
        for ref in refs:
            if ref.shard not in ("", self._shard):
                raise vertex_not_found(ref, self._shard)
        names = [keys.row(run_id, ref.agent, ref.vertex_id) for ref in refs]
        backend = self._database.backend
        metas = backend.get_many(Table.ROWS, names)
        for ref, meta in zip(refs, metas, strict=True):
            if meta is None:
                raise vertex_not_found(ref, self._shard)
        full = request.view == pb.VERTEX_VIEW_FULL
        payloads = backend.get_many(Table.PAYLOADS, names) if full else [None] * len(names)
        parts = [
            wire.vertex(meta, payload)
            for meta, payload in zip(metas, payloads, strict=True)
            if meta is not None
        ]
        response = wire.vertices_response(parts)
        if len(response) > MAX_MESSAGE_BYTES:
            raise DomainError(
                ErrorReason.MESSAGE_TOO_LARGE,
                f"{len(refs)} rows make {len(response)} bytes; ask for fewer at a time",
            )
        return response

    async def list_vertices(self, request: pb.ListVerticesRequest) -> bytes:
        """Serialised `ListVerticesResponse`: one page by agent and id.

        A page may be short, even empty, while the token goes on: a filter that fits little is
        answered in bounded steps.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT for a token.
        """
        self._runs.require(request.run_id)
        token = _Token(request.run_id.encode() + request.filter.SerializeToString())
        limit = _page_size(request.page_size)
        parts: list[bytes] = []
        size_bytes = scanned = 0
        after = token.read(request.page_token)
        async for key, meta_bytes in self._candidates(request, after):
            scanned += 1
            if scanned > _MAX_SCANNED or len(parts) >= limit or size_bytes >= _PAGE_BYTES:
                break
            after = key
            if not _matches(graph_pb2.VertexMeta.FromString(meta_bytes), request.filter):
                continue
            payload = None
            if request.view == pb.VERTEX_VIEW_FULL:
                payload = self._database.get(Table.PAYLOADS, key)
            parts.append(wire.vertex(meta_bytes, payload))
            size_bytes += len(parts[-1])
        else:
            return wire.vertices_response(parts)
        return wire.vertices_response(parts) + wire.field(2, token.write(after))

    async def list_samples(self, request: pb.ListSamplesRequest) -> pb.ListSamplesResponse:
        """One page of samples by id.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT for a token.
        """
        response = pb.ListSamplesResponse()

        def take(value: bytes) -> bool:
            sample = graph_pb2.Sample.FromString(value)
            fits = not request.HasField("batch") or sample.batch == request.batch
            if fits and request.group_id in ("", sample.group_id):
                response.samples.append(sample)
            return len(response.samples) >= _page_size(request.page_size)

        batch = request.batch if request.HasField("batch") else None
        stem = _batch_stem(batch, evaluation=request.evaluation)
        if request.group_id:
            stem = request.group_id + "-"
        response.next_page_token = await self._page(
            keys.prefix("sample", request.run_id) + stem.encode(),
            request.run_id,
            _scope(request),
            request.page_token,
            take,
        )
        return response

    async def list_groups(self, request: pb.ListGroupsRequest) -> pb.ListGroupsResponse:
        """One page of groups by id.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT for a token.
        """
        response = pb.ListGroupsResponse()

        def take(value: bytes) -> bool:
            group = graph_pb2.Group.FromString(value)
            if not request.HasField("batch") or group.batch == request.batch:
                response.groups.append(group)
            return len(response.groups) >= _page_size(request.page_size)

        batch = request.batch if request.HasField("batch") else None
        response.next_page_token = await self._page(
            keys.prefix("group", request.run_id) + _batch_stem(batch).encode(),
            request.run_id,
            _scope(request),
            request.page_token,
            take,
        )
        return response

    async def sample_graph(self, request: pb.GetSampleGraphRequest) -> pb.GetSampleGraphResponse:
        """A sample, by id or by a prefix that fits one, with its vertices in topological order.

        Raises:
            DomainError: RUN_NOT_FOUND, NOT_FOUND, INVALID_ARGUMENT for an ambiguous prefix.
        """
        entry = self._runs.require(request.run_id)
        sample = self._find_sample(request.run_id, request.sample_id)
        vertices: dict[str, graph_pb2.Vertex] = {}
        for agent in sorted(entry.agents):
            prefix = keys.row(request.run_id, agent, sample.sample_id + "/")
            async for key, value in _patient(self._database.scan(Table.ROWS, prefix)):
                payload = None
                if request.view == pb.VERTEX_VIEW_FULL:
                    payload = self._database.get(Table.PAYLOADS, key)
                found = graph_pb2.Vertex.FromString(wire.vertex(value, payload))
                vertices[found.meta.vertex_id] = found
        edges = {name: list(v.meta.upstream_vertex_ids) for name, v in vertices.items()}
        order = graph_rules.topological_order(edges)
        return pb.GetSampleGraphResponse(sample=sample, vertices=[vertices[name] for name in order])

    async def count_vertices(self, request: pb.CountVerticesRequest) -> pb.CountVerticesResponse:
        """The account of a batch attempt.

        Raises:
            DomainError: RUN_NOT_FOUND.
        """
        entry = self._runs.require(request.run_id)
        account = BatchAccount(request.consumed_micro_batch_ids)
        response = pb.CountVerticesResponse()
        stem = f"{BatchId(request.batch, request.batch_attempt)}-"
        for agent in sorted(entry.agents):
            prefix = keys.row(request.run_id, agent, stem)
            async for _, value in _patient(self._database.scan(Table.ROWS, prefix)):
                meta = graph_pb2.VertexMeta.FromString(value)
                is_open = account.add(
                    meta.policy,
                    status=VERTEX_STATUS.to_core(meta.status),
                    trainable=meta.trainable,
                    void_reason=VOID_REASON.optional(meta.void_reason),
                    micro_batch_id=meta.micro_batch_id,
                )
                if is_open:
                    response.open_rows.append(
                        common_pb2.VertexRef(
                            shard=self._shard, vertex_id=meta.vertex_id, agent=agent
                        )
                    )
        for policy, counts in account.policies.items():
            response.policies[policy].CopyFrom(
                graph_pb2.PolicyCounts(
                    finished=counts.finished,
                    consumed=counts.consumed,
                    voided={reason.value: n for reason, n in counts.voided.items()},
                    untrained=counts.untrained,
                    cancelled=counts.cancelled,
                )
            )
        return response

    async def _candidates(
        self, request: pb.ListVerticesRequest, after: bytes
    ) -> AsyncIterator[tuple[bytes, bytes]]:
        run_id, chosen = request.run_id, request.filter
        agents = self._agents(run_id, chosen.agent)
        for agent, stem in itertools.product(agents, _vertex_stems(chosen)):
            prefix = keys.row(run_id, agent, stem)
            end = keys.after(prefix)
            if after >= end:
                continue
            start = max(prefix, after + b"\0") if after else prefix
            if chosen.claimable:
                pairs = self._claimed(run_id, agent, start, end)
            else:
                pairs = self._database.backend.scan(Table.ROWS, start, end)
            async for pair in _patient(pairs):
                yield pair

    def _claimed(
        self, run_id: str, agent: str, start: bytes, end: bytes
    ) -> Iterator[tuple[bytes, bytes]]:
        for key in self._claims.scan(run_id, agent, start):
            if key >= end:
                return
            meta = self._database.get(Table.ROWS, key)
            if meta is not None:
                yield key, meta

    def _agents(self, run_id: str, agent: str) -> list[str]:
        known = self._runs.require(run_id).agents
        return sorted(known) if not agent else [agent] if agent in known else []

    def _find_sample(self, run_id: str, sample_id: str) -> graph_pb2.Sample:
        exact = self._database.get(Table.GRAPH, keys.join("sample", run_id, sample_id))
        if exact is not None:
            return graph_pb2.Sample.FromString(exact)
        prefix = keys.join("sample", run_id, sample_id)
        pairs = self._database.scan(Table.GRAPH, prefix)
        found = [value for (_, value), _ in zip(pairs, range(2), strict=False)]
        if len(found) == 1:
            return graph_pb2.Sample.FromString(found[0])
        if found:
            raise ValueError(f"sample {sample_id!r} fits several samples of run {run_id!r}")
        raise DomainError(
            ErrorReason.NOT_FOUND,
            f"no sample {sample_id!r} in run {run_id!r}",
            {"sample": sample_id},
        )

    async def _page(
        self,
        prefix: bytes,
        run_id: str,
        scope: bytes,
        page_token: str,
        take: Callable[[bytes], bool],
    ) -> str:
        self._runs.require(run_id)
        token = _Token(scope)
        after = token.read(page_token)
        start = max(prefix, after + b"\0") if after else prefix
        pairs = self._database.backend.scan(Table.GRAPH, start, keys.after(prefix))
        async for key, value in _patient(pairs):
            if take(value):
                return token.write(key).decode()
        return ""


class _Token:
    """Page tokens of one query: the last key delivered, bound to the query by a hash."""

    def __init__(self, query: bytes) -> None:
        self._digest = hashlib.sha256(query).digest()[:8]

    def write(self, key: bytes) -> bytes:
        """Token that goes on after a key."""
        return base64.urlsafe_b64encode(self._digest + key)

    def read(self, token: str) -> bytes:
        """Key to go on after; empty for no token.

        Raises:
            ValueError: The token is of another query, or none at all.
        """
        if not token:
            return b""
        try:
            data = base64.b64decode(token, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            data = b""
        if data[:8] != self._digest:
            raise ValueError("page_token is not of this query")
        return data[8:]


async def _patient(pairs: Iterator[tuple[bytes, bytes]]) -> AsyncIterator[tuple[bytes, bytes]]:
    for number, pair in enumerate(pairs, start=1):
        yield pair
        if number % _YIELD_EVERY == 0:
            await asyncio.sleep(0)


def _page_size(asked: int) -> int:
    return min(asked or DEFAULT_PAGE, MAX_PAGE)


def _batch_stem(batch: int | None, *, evaluation: bool = False) -> str:
    # An evaluation's ids start with another letter: no list of a batch meets them.
    return "" if batch is None else f"{'e' if evaluation else 'b'}{batch:06d}a"


def _vertex_stems(chosen: pb.VertexFilter) -> list[str]:
    """What the ids of fitting vertices start with, in the order of the ids."""
    if chosen.group_ids and (chosen.group_id or chosen.sample_id):
        raise ValueError("filter: group_ids goes with neither group_id nor sample_id")
    if chosen.sample_id:
        return [f"{chosen.sample_id}/"]
    if chosen.group_id:
        return [f"{chosen.group_id}-"]
    if chosen.group_ids:
        return [f"{group_id}-" for group_id in sorted(set(chosen.group_ids))]
    return [_batch_stem(chosen.batch if chosen.HasField("batch") else None)]


def _scope(request: pb.ListSamplesRequest | pb.ListGroupsRequest) -> bytes:
    kept = type(request)()
    kept.CopyFrom(request)  # type: ignore[arg-type] # of the same type
    kept.page_token = ""
    kept.page_size = 0
    return kept.SerializeToString()


def _matches(meta: graph_pb2.VertexMeta, chosen: pb.VertexFilter) -> bool:
    return (
        (not chosen.HasField("batch") or meta.batch == chosen.batch)
        and chosen.group_id in ("", meta.group_id)
        and chosen.sample_id in ("", meta.sample_id)
        and chosen.policy in ("", meta.policy)
        and chosen.status in (common_pb2.VERTEX_STATUS_UNSPECIFIED, meta.status)
        and chosen.void_reason in (common_pb2.VOID_REASON_UNSPECIFIED, meta.void_reason)
        and (not chosen.claimable or is_claimable(meta))
    )
