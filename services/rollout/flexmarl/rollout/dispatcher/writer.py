"""Durable writes of rows: coalesced over all that wait, at most a few in flight, never lost.

Each row comes with a callback that is told its outcome once the row is durable; calls are answered
from there, so nothing is answered before it is stored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from flexmarl.api.meg_store.v1.graph_pb2 import Sample, Vertex
from flexmarl.api.meg_store.v1.meg_store_pb2 import WriteGraphResponse
from flexmarl.client.request import new_request_id
from flexmarl.core.errors import DomainError, ErrorFamily, ErrorReason
from flexmarl.runtime.logging import get_logger

_log = get_logger(__name__)

OnStored = Callable[[int], None]
"""Told the `WriteOutcome` of a row."""

MAX_ROWS: Final = 1024
MAX_BYTES: Final = 4 << 20
MAX_IN_FLIGHT: Final = 2
RETRY_S: Final = 0.2
_HELD: Final = (ErrorFamily.UNAVAILABLE, ErrorFamily.DEADLINE)


class GraphStore(Protocol):
    """The part of the MEG Store's client that the writer needs."""

    async def write_graph(
        self,
        run_id: str,
        *,
        term: int,
        samples: Iterable[Sample],
        vertices: Iterable[Vertex],
        request_id: str | None,
    ) -> WriteGraphResponse:
        """Writes rows in one atomic, durable write."""
        ...


@dataclass(slots=True)
class _Entry:
    """Rows that are written together, and who is told."""

    samples: list[Sample]
    vertices: list[Vertex]
    size_bytes: int
    on_stored: OnStored


class GraphWriter:
    """Writes the rows of one run.

    `run` has as many lanes as there may be writes in flight. A lane waits for rows (freed by
    `vertex` or `sample`), then for the store; what came meanwhile is written next. What is queued
    is bounded by the samples in progress. While the store is away the rows are held and written
    again; after `patience_s` `on_trouble` is told, and the writer goes on trying until it is
    stopped.

    Args:
        store: The store.
        run_id: The run.
        term: Term to write under, read for each try: a newer orchestrator raises it.
        on_trouble: Told of a failure that ends the run; None takes a transient one back.
        patience_s: How long the store may be away before that is told.
    """

    def __init__(
        self,
        store: GraphStore,
        *,
        run_id: str,
        term: Callable[[], int],
        on_trouble: Callable[[DomainError | None], None],
        patience_s: float,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._term = term
        self._on_trouble = on_trouble
        self._patience_s = patience_s
        self._queue: deque[_Entry] = deque()
        self._filled = asyncio.Event()
        self._under_way: dict[str, float] = {}

    def waiting_s(self, now: float) -> float:
        """How long the oldest write under way waits, by the loop's clock.

        A store that hangs answers nothing, not even an error: the time that passes is all there is
        to see of it.
        """
        return now - min(self._under_way.values(), default=now)

    def vertex(self, vertex: Vertex, on_stored: OnStored) -> None:
        """Queues one vertex."""
        self._add(_Entry([], [vertex], vertex.ByteSize(), on_stored))

    def sample(self, sample: Sample, vertices: list[Vertex], on_stored: OnStored) -> None:
        """Queues a sample's new state, together with vertices that end with it."""
        size_bytes = sample.ByteSize() + sum(vertex.ByteSize() for vertex in vertices)
        self._add(_Entry([sample], vertices, size_bytes, on_stored))

    async def run(self) -> None:
        """Writes until cancelled."""
        lanes = [
            asyncio.create_task(self._write_on(), name=f"graph writes {lane}")
            for lane in range(MAX_IN_FLIGHT)
        ]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()

    async def _write_on(self) -> None:
        """One write after the other: a task for each of them would cost as much as a row."""
        while True:
            await self._filled.wait()
            batch = self._cut()
            if not batch:
                continue  # the other lane was faster
            try:
                await self._write(batch)
            except Exception as error:  # noqa: BLE001 - told, and what comes next is tried
                _log.exception("graph_write_failed")
                message = f"rows could not be written: {error}"
                failure = DomainError(ErrorReason.INTERNAL, message)
                self._on_trouble(error if isinstance(error, DomainError) else failure)

    def _add(self, entry: _Entry) -> None:
        self._queue.append(entry)
        self._filled.set()

    def _cut(self) -> list[_Entry]:
        batch: list[_Entry] = []
        num_rows = size_bytes = 0
        while self._queue:
            entry = self._queue[0]
            rows = len(entry.samples) + len(entry.vertices)
            full = num_rows + rows > MAX_ROWS or size_bytes + entry.size_bytes > MAX_BYTES
            if batch and full:
                break
            self._queue.popleft()
            batch.append(entry)
            num_rows += rows
            size_bytes += entry.size_bytes
        if not self._queue:
            self._filled.clear()
        return batch

    async def _write(self, batch: list[_Entry]) -> None:
        samples = [sample for entry in batch for sample in entry.samples]
        vertices = [vertex for entry in batch for vertex in entry.vertices]
        response = await self._persist(samples, vertices)
        # An entry's last row tells: of a sample and the vertices that end with it, the sample.
        of_samples, of_vertices = response.sample_outcomes[:], response.vertex_outcomes[:]
        sample = vertex = 0
        for entry in batch:
            sample += len(entry.samples)
            vertex += len(entry.vertices)
            outcome = of_samples[sample - 1] if entry.samples else of_vertices[vertex - 1]
            entry.on_stored(outcome)

    async def _persist(self, samples: list[Sample], vertices: list[Vertex]) -> WriteGraphResponse:
        """Repeats a write until it is durable, or refused for good."""
        first_id = new_request_id()
        self._under_way[first_id] = asyncio.get_running_loop().time()
        try:
            return await self._persist_as(first_id, samples, vertices)
        finally:
            del self._under_way[first_id]

    async def _persist_as(
        self, request_id: str, samples: list[Sample], vertices: list[Vertex]
    ) -> WriteGraphResponse:
        loop = asyncio.get_running_loop()
        started, told = loop.time(), False
        term = self._term()
        while True:
            try:
                response = await self._store.write_graph(
                    self._run_id,
                    term=term,
                    samples=samples,
                    vertices=vertices,
                    request_id=request_id,
                )
            except DomainError as error:
                stale = error.reason is ErrorReason.TERM_STALE
                if not stale and error.reason.family not in _HELD:
                    raise
                if term != self._term():
                    # A newer orchestrator has taken the run over: another call, another id.
                    term, request_id = self._term(), new_request_id()
                    continue
                if loop.time() - started > self._patience_s and not told:
                    told = True
                    self._on_trouble(error)
                await asyncio.sleep(RETRY_S)
                continue
            if told:
                self._on_trouble(None)
            return response
