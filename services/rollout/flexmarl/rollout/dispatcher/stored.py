"""Reading what a run has stored, patiently: a store that is away is told of and asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from flexmarl.api.common.v1.common_pb2 import Failure, VertexRef
from flexmarl.api.meg_store.v1.graph_pb2 import VertexPayload
from flexmarl.api.meg_store.v1.meg_store_pb2 import (
    VERTEX_VIEW_FULL,
    VERTEX_VIEW_META,
    GetSampleGraphResponse,
    VertexFilter,
    VertexView,
)
from flexmarl.api.rollout.v1.worker_pb2 import CallAnswer
from flexmarl.client.store import StoreClient
from flexmarl.core.errors import DomainError, ErrorFamily, ErrorReason

MAX_READS: Final = 16
RETRY_S: Final = 1.0
_ANSWERS: Final = frozenset(
    (ErrorReason.NOT_FOUND, ErrorReason.VERTEX_NOT_FOUND, ErrorReason.MESSAGE_TOO_LARGE)
)
"""What was asked for is not there, or too much at once: no trouble of the store's, whoever asked
decides."""

T = TypeVar("T")


class StoredRows:
    """See the module; at most `MAX_READS` graphs are read at a time.

    Args:
        store: The store.
        run_id: The run.
        on_trouble: Told of each failure.
    """

    def __init__(
        self, store: StoreClient, *, run_id: str, on_trouble: Callable[[DomainError], None]
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._on_trouble = on_trouble
        self._reads = asyncio.Semaphore(MAX_READS)

    async def graph(self, sample_id: str) -> GetSampleGraphResponse:
        """A sample with its vertices; waits for a place among the reads, and for the store.

        Raises:
            DomainError: NOT_FOUND; no such sample is stored.
        """
        async with self._reads:
            try:
                return await self._graph(sample_id, VERTEX_VIEW_FULL)
            except DomainError as error:
                if error.reason is not ErrorReason.MESSAGE_TOO_LARGE:
                    raise
            # Nearly always all of it fits one message, and one call is enough.
            graph = await self._graph(sample_id, VERTEX_VIEW_META)
            payloads = await self._patiently(lambda: self._payloads(sample_id))
            for vertex in graph.vertices:
                if (payload := payloads.get(vertex.meta.vertex_id)) is not None:
                    vertex.payload.CopyFrom(payload)
            return graph

    async def _graph(self, sample_id: str, view: VertexView.ValueType) -> GetSampleGraphResponse:
        return await self._patiently(
            lambda: self._store.get_sample_graph(self._run_id, sample_id, view=view)
        )

    async def _payloads(self, sample_id: str) -> dict[str, VertexPayload]:
        """What a repeated run is answered with, page by page, by vertex id.

        Prompts and log-probs are left out: a worker has no use for them, and its link a limit, too.
        """
        chosen = VertexFilter(sample_id=sample_id)
        return {
            vertex.meta.vertex_id: VertexPayload(
                response_tokens=vertex.payload.response_tokens, output=vertex.payload.output
            )
            async for vertex in self._store.list_vertices(
                self._run_id, chosen, view=VERTEX_VIEW_FULL
            )
        }

    async def find_graph(self, sample_id: str) -> GetSampleGraphResponse | None:
        """A sample that may never have begun; None then. Without payloads; waits as `graph`."""
        try:
            async with self._reads:
                return await self._graph(sample_id, VERTEX_VIEW_META)
        except DomainError as error:
            if error.reason is not ErrorReason.NOT_FOUND:
                raise
            return None

    async def answer(self, vertex_id: str, agent: str) -> CallAnswer:
        """What a stored vertex answers its call with; waits for the store."""
        ref = VertexRef(vertex_id=vertex_id, agent=agent)
        try:
            (vertex,) = await self._patiently(
                lambda: self._store.get_vertices(self._run_id, [ref], view=VERTEX_VIEW_FULL)
            )
        except DomainError as error:
            if error.reason is not ErrorReason.VERTEX_NOT_FOUND:
                raise
            # Not stored before but late: the group has ended, and this sample is about to be cut.
            failure = Failure(
                reason=ErrorReason.CANCELLED, message=f"{vertex_id}: its group has ended"
            )
            return CallAnswer(vertex_id=vertex_id, failure=failure)
        return CallAnswer(
            vertex_id=vertex_id,
            tokens=vertex.payload.response_tokens,
            finish_reason=vertex.meta.finish_reason,
            failure=vertex.meta.failure if vertex.meta.HasField("failure") else None,
            finished_unix_ns=vertex.meta.finished_unix_ns,
            output=vertex.payload.output,
            stored_before=True,
        )

    async def _patiently(self, read: Callable[[], Awaitable[T]]) -> T:
        """Repeats a read while the store is away, until the run is closed."""
        while True:
            try:
                return await read()
            except DomainError as error:
                if error.reason in _ANSWERS:
                    raise
                self._on_trouble(error)
                if error.reason.family is not ErrorFamily.UNAVAILABLE:
                    raise
                await asyncio.sleep(RETRY_S)
