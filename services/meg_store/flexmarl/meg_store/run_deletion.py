"""DeleteRun: an ended run, all below it, and the space that it took.

The run is hidden first, so that nothing can be added to it; then one write removes every key that
is the run's and takes its references off shared objects. A crash before that write changes nothing,
a repeated call after it is answered. Segments that are mapped keep their files until the last lease
ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import store_keys as keys
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Database, Draft
from flexmarl.meg_store.objects import Objects
from flexmarl.meg_store.runs import RunEntry, Runs, object_keys
from flexmarl.meg_store.segments import Segments

_BY_KIND: Final[Mapping[Table, Sequence[str]]] = {
    Table.META: ("agent", "term", "closed", "micro_batch", "state", "manifest", "pin"),
    Table.GRAPH: ("group", "sample"),
    Table.MARKS: ("claim", "owner"),
    Table.REQUESTS: ("id", "order"),
}
"""Kinds of keys below a run, in the tables that hold several kinds."""

_BY_RUN: Final = (Table.ROWS, Table.PAYLOADS, Table.EVENTS, Table.LATE)
"""Tables whose keys start with the run."""

_YIELD_EVERY: Final = 256


class RunDeletion:
    """Deletes runs of this shard.

    Args:
        database: Keeps everything.
        runs: The runs.
        objects: For their counts.
        shard: Name of this shard.
        segments: Frees the run's segments.
        forget: Drop what rooms remember of a run.
        start: Runs a background task under a name.
    """

    def __init__(
        self,
        database: Database,
        runs: Runs,
        objects: Objects,
        *,
        shard: str,
        segments: Segments,
        forget: Sequence[Callable[[str], None]],
        start: Callable[[str, Coroutine[Any, Any, Any]], object],
    ) -> None:
        self._database = database
        self._runs = runs
        self._objects = objects
        self._shard = shard
        self._segments = segments
        self._forget = (*forget, runs.forget, database.forget)
        self._start = start

    async def delete(self, request: pb.DeleteRunRequest, payload: bytes) -> bytes:
        """Delete a run; returns the serialised response.

        Raises:
            DomainError: RUN_NOT_FOUND, STATE_TRANSITION_REFUSED while it is driven.
        """
        run_id = request.run_id
        known = run_id in self._runs.ids()
        with self._runs.deleting(run_id) if known else nullcontext() as entry:
            references = Counter[str]() if entry is None else await self._references(entry)

            def build(draft: Draft) -> pb.DeleteRunResponse:
                if entry is None:
                    self._runs.require(run_id)  # not a repeated call: there is no such run
                self._remove(draft, run_id, references)
                return pb.DeleteRunResponse()

            # Remembered under no run: it must outlive this one.
            response = await self._database.mutate(
                "", request.request_id, payload, build, essential=True
            )
        if known:
            self._start(f"compaction after run {run_id}", self._database.compact(_ranges(run_id)))
        return response

    def _remove(self, draft: Draft, run_id: str, references: Mapping[str, int]) -> None:
        for key, count in references.items():
            self._objects.refer(draft, key, -count)
        for segment in self._segments.of_run(run_id):
            self._segments.free(draft, segment)
        draft.delete(Table.META, keys.join("run", run_id))
        for table, start, end in _ranges(run_id):
            draft.delete_range(table, start, end)
        draft.at_commit += [partial(forget, run_id) for forget in self._forget]

    async def _references(self, entry: RunEntry) -> Counter[str]:
        """References that the run's rows hold on objects, by key."""
        found = Counter(object_keys(entry.run, shard=self._shard))
        if graph_pb2.COLUMN_TYPE_OBJECT not in entry.columns.values():
            return found
        rows = self._database.scan(Table.PAYLOADS, keys.prefix(entry.run_id))
        for number, (_, value) in enumerate(rows, start=1):
            columns = graph_pb2.VertexPayload.FromString(value).columns
            found.update(
                column.object_value.key
                for column in columns.values()
                if column.HasField("object_value")
            )
            if number % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
        return found


def _ranges(run_id: str) -> list[tuple[Table, bytes, bytes]]:
    prefixes = [(table, keys.prefix(run_id)) for table in _BY_RUN]
    for table, kinds in _BY_KIND.items():
        prefixes += [(table, keys.prefix(kind, run_id)) for kind in kinds]
    return [(table, prefix, keys.after(prefix)) for table, prefix in prefixes]
