"""Reads by reference, lists of samples, groups and claimable rows, and the account of a batch.

All reads see applied rows only. Listings of vertices are in vertex_listing.py, reads that follow
edges in graph_queries.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Final, cast

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.enums import VERTEX_STATUS, VOID_REASON
from flexmarl.core import store_keys as keys
from flexmarl.core.batch_account import BatchAccount
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import BatchId, check_name
from flexmarl.core.keepalive import MAX_MESSAGE_BYTES
from flexmarl.meg_store import wire
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.claims import Claims
from flexmarl.meg_store.database import Database
from flexmarl.meg_store.micro_batches import record_key
from flexmarl.meg_store.paging import PAGE_BYTES, Token, page_size, patient
from flexmarl.meg_store.rows import vertex_not_found
from flexmarl.meg_store.runs import Runs
from flexmarl.meg_store.vertex_listing import batch_stem

_ListRequest = pb.ListSamplesRequest | pb.ListGroupsRequest | pb.ListMicroBatchesRequest

_ref: Final = attrgetter("shard", "agent", "vertex_id")

_ROWS_PER_SLICE: Final = 128
"""Read in one go: rows of 4 KB take some milliseconds."""


class Queries:
    """Answers reads from applied rows only."""

    def __init__(self, database: Database, runs: Runs, claims: Claims, *, shard: str) -> None:
        self._database = database
        self._runs = runs
        self._claims = claims
        self._shard = shard

    async def get_vertices(self, request: pb.GetVerticesRequest) -> bytes:
        """Serialised `GetVerticesResponse` of rows in the order asked for.

        Raises:
            DomainError: RUN_NOT_FOUND, VERTEX_NOT_FOUND, MESSAGE_TOO_LARGE.
        """
        run_id = self._runs.require(request.run_id).run_id
        full = request.view == pb.VERTEX_VIEW_FULL
        parts: list[bytes] = []
        size_bytes = 0
        for start in range(0, len(request.rows), _ROWS_PER_SLICE):
            if start:
                await asyncio.sleep(0)  # others run between the slices of a large read
            refs = request.rows[start : start + _ROWS_PER_SLICE]
            size_bytes += wire.add_vertices(parts, self._read(run_id, refs, full=full))
            if size_bytes > MAX_MESSAGE_BYTES:
                raise DomainError(
                    ErrorReason.MESSAGE_TOO_LARGE,
                    f"{len(request.rows)} rows make more than {MAX_MESSAGE_BYTES} bytes; "
                    "ask for fewer at a time",
                )
        return b"".join(parts)

    def _read(
        self, run_id: str, refs: Sequence[common_pb2.VertexRef], *, full: bool
    ) -> Iterable[wire.Row]:
        here = ("", self._shard)
        names: list[bytes] = []
        for ref in refs:
            shard, agent, vertex_id = _ref(ref)
            if shard not in here:
                raise vertex_not_found(ref, self._shard)
            names.append(keys.row(run_id, agent, vertex_id))
        backend = self._database.backend
        metas = backend.get_many(Table.ROWS, names)
        if None in metas:
            raise vertex_not_found(refs[metas.index(None)], self._shard)
        payloads = backend.get_many(Table.PAYLOADS, names) if full else [None] * len(names)
        return zip(cast("list[bytes]", metas), payloads, strict=True)

    def list_claimable(self, request: pb.ListClaimableRequest) -> bytes:
        """Serialised `ListClaimableResponse`: those of the oldest group first.

        Raises:
            DomainError: RUN_NOT_FOUND.
            ValueError: No policy is named.
        """
        self._runs.require(request.run_id)
        rows, more = self._claims.oldest(
            request.run_id,
            check_name(request.policy, what="policy"),
            max_rows=page_size(request.max_rows),
            max_tokens=request.max_tokens,
        )
        return wire.claimable_response(rows, more=more)

    async def list_samples(self, request: pb.ListSamplesRequest) -> pb.ListSamplesResponse:
        """One page of samples by id.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT for a token.
        """
        response = pb.ListSamplesResponse()

        def take(value: bytes) -> bool:
            sample = graph_pb2.Sample.FromString(value)
            fits = not request.HasField("batch") or sample.batch == request.batch
            fits = fits and request.group_id in ("", sample.group_id)
            if fits:
                response.samples.append(sample)
            return fits

        batch = request.batch if request.HasField("batch") else None
        stem = batch_stem(batch, evaluation=request.evaluation)
        if request.group_id:
            stem = request.group_id + "-"
        response.next_page_token = await self._page(
            Table.GRAPH,
            keys.prefix("sample", request.run_id) + stem.encode(),
            request,
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
            fits = not request.HasField("batch") or group.batch == request.batch
            if fits:
                response.groups.append(group)
            return fits

        batch = request.batch if request.HasField("batch") else None
        response.next_page_token = await self._page(
            Table.GRAPH,
            keys.prefix("group", request.run_id) + batch_stem(batch).encode(),
            request,
            take,
        )
        return response

    async def list_micro_batches(
        self, request: pb.ListMicroBatchesRequest
    ) -> pb.ListMicroBatchesResponse:
        """One page of a batch's records in order of creation.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT for a token.
        """
        response = pb.ListMicroBatchesResponse()

        def take(value: bytes) -> bool:
            record = graph_pb2.MicroBatch.FromString(value)
            fits = request.policy in ("", record.policy)
            if fits:
                response.micro_batches.append(record)
            return fits

        response.next_page_token = await self._page(
            Table.META, record_key(request.run_id, request.batch, ""), request, take
        )
        return response

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
            async for _, value in patient(self._database.scan(Table.ROWS, prefix)):
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

    async def _page(
        self,
        table: Table,
        prefix: bytes,
        request: _ListRequest,
        take: Callable[[bytes], bool],
    ) -> str:
        """Give rows to `take`, which says whether it wants them; returns the next page's token."""
        self._runs.require(request.run_id)
        token = Token(_scope(request))
        after = token.read(request.page_token)
        start = max(prefix, after + b"\0") if after else prefix
        pairs = self._database.backend.scan(table, start, keys.after(prefix))
        limit = page_size(request.page_size)
        taken = size_bytes = 0
        async for key, value in patient(pairs):
            if not take(value):
                continue
            taken += 1
            size_bytes += len(value)
            if taken >= limit or size_bytes >= PAGE_BYTES:
                return token.write(key).decode()
        return ""


def _scope(request: _ListRequest) -> bytes:
    kept = type(request)()
    kept.CopyFrom(request)  # type: ignore[arg-type] # of the same type
    kept.page_token = ""
    kept.page_size = 0
    return kept.SerializeToString()
