"""Reading what a run has stored, patiently: a store that is away is told of and asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from flexmarl.api.common.v1.common_pb2 import Failure, VertexRef
from flexmarl.api.meg_store.v1.meg_store_pb2 import VERTEX_VIEW_FULL, GetSampleGraphResponse
from flexmarl.api.rollout.v1.worker_pb2 import CallAnswer
from flexmarl.client.store import StoreClient
from flexmarl.core.errors import DomainError, ErrorFamily, ErrorReason

MAX_READS: Final = 16
RETRY_S: Final = 1.0
_ABSENT: Final = frozenset((ErrorReason.NOT_FOUND, ErrorReason.VERTEX_NOT_FOUND))
"""What was asked for is not there: no trouble of the store's, whoever asked decides."""

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
            return await self._patiently(
                lambda: self._store.get_sample_graph(self._run_id, sample_id, view=VERTEX_VIEW_FULL)
            )

    async def find_graph(self, sample_id: str) -> GetSampleGraphResponse | None:
        """The same, of a sample that may never have begun; None then."""
        try:
            return await self.graph(sample_id)
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
                if error.reason in _ABSENT:
                    raise
                self._on_trouble(error)
                if error.reason.family is not ErrorFamily.UNAVAILABLE:
                    raise
                await asyncio.sleep(RETRY_S)
