"""I12 of the store alone: clients write, the service is killed at random, and nothing is lost.

Writers, a former of micro-batches and the killer run beside each other. Whatever was acknowledged
is there at the end, no row is in two micro-batches, and the data pass the store's own check.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from meg_store.store_harness import (
    RUN,
    StoreProcess,
    a_group,
    a_record,
    a_run,
    a_vertex,
    closure,
    ref,
)

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.client.store import StoreClient
from flexmarl.meg_store.check.store import check_stores

_ROWS = 6
_WRITERS = 3


@dataclass
class Acknowledged:
    """What the store said is done."""

    rows: list[graph.Vertex] = field(default_factory=list)
    closed: set[str] = field(default_factory=set)
    records: list[graph.MicroBatch] = field(default_factory=list)
    marked: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows) + len(self.closed) + len(self.records) + len(self.marked)


async def write_groups(
    store: StoreClient, term: int, numbers: itertools.count, done: Acknowledged, stop: asyncio.Event
) -> None:
    while not stop.is_set():
        number = next(numbers)
        tokens = 2000 if number % 4 == 0 else 2  # large calls are written another way
        rows = [a_vertex(call, group=number, tokens=tokens) for call in range(_ROWS)]
        await store.write_graph(RUN, term=term, groups=[a_group(number)], vertices=rows[:1])
        await store.write_graph(RUN, term=term, vertices=rows[1:])
        done.rows += rows
        await store.close_groups(RUN, [closure(*rows, group=number)], term=term)
        done.closed.add(rows[0].meta.group_id)
        if number % 8 == 0:
            content = b"%d" % number * 1000
            done.objects[(await store.put_object(content)).key] = content


async def form_micro_batches(
    store: StoreClient, term: int, done: Acknowledged, written: asyncio.Event
) -> None:
    for ordinal in itertools.count():
        last = written.is_set()  # asked before the listing: what is closed later is listed again
        listed = (await store.list_claimable(RUN, "p", max_rows=10)).rows
        if not listed and last:
            return
        if not listed:
            await asyncio.sleep(0.01)
            continue
        record = a_record(ordinal=ordinal, term=term)
        record.rows.extend(row.row for row in listed)
        await store.create_micro_batch(RUN, record)
        done.records.append(record)
        await store.mark_rows(RUN, record.micro_batch_id, record.rows, term=term)
        done.marked.update(dict.fromkeys((r.vertex_id for r in record.rows), record.micro_batch_id))


async def kill_at_random(process: StoreProcess, done: Acknowledged, *, kills: int) -> None:
    rng = random.Random(kills)
    for _ in range(kills):
        before = len(done)
        async with asyncio.timeout(60):
            while len(done) == before:  # noqa: ASYNC110 - progress, not an event
                await asyncio.sleep(0.005)
        await asyncio.sleep(rng.uniform(0, 0.3))
        process.kill()
        await process.start()


async def crash(process: StoreProcess, *, kills: int) -> Acknowledged:
    done, stop, numbers = Acknowledged(), asyncio.Event(), itertools.count()
    async with StoreClient.connect(await process.start(), patience_s=60) as store:
        await store.create_run(a_run())
        term = await store.acquire_term(RUN, "orchestrator", holder="test")
        async with asyncio.TaskGroup() as forming:
            written = asyncio.Event()
            forming.create_task(form_micro_batches(store, term, done, written))
            async with asyncio.TaskGroup() as writing:
                for _ in range(_WRITERS):
                    writing.create_task(write_groups(store, term, numbers, done, stop))
                await kill_at_random(process, done, kills=kills)
                stop.set()
            written.set()
        await verify(store, done)
    assert process.stop() == 0
    report = check_stores([Path(process.folder) / "data"])
    assert report.findings == []
    return done


async def verify(store: StoreClient, done: Acknowledged) -> None:
    found = {
        vertex.meta.vertex_id: vertex
        for start in range(0, len(done.rows), 500)
        for vertex in await store.get_vertices(
            RUN, [ref(vertex) for vertex in done.rows[start : start + 500]]
        )
    }
    for row in done.rows:
        stored = found[row.meta.vertex_id]
        assert stored.payload == row.payload
        # The last listing was empty: whatever was released is marked, once.
        assert stored.meta.micro_batch_id == done.marked[row.meta.vertex_id]
    groups = await store.list_groups(RUN)
    closed = {g.group_id for g in groups if g.status == common.GROUP_STATUS_CLOSED}
    assert done.closed == closed
    assert list(await store.list_micro_batches(RUN, batch=0)) == done.records
    taken = [row.vertex_id for record in done.records for row in record.rows]
    assert len(taken) == len(set(taken))
    for key, content in done.objects.items():
        assert await store.get_object(key) == content


@pytest.mark.parametrize(
    "kills",
    [
        2,
        pytest.param(20, marks=[pytest.mark.real, pytest.mark.timeout(300)]),
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
async def test_acknowledged_writes_survive_and_no_mark_is_doubled(process, kills, proves):
    done = await crash(process, kills=kills)
    assert done.rows
    assert done.records
    proves(
        f"{kills} kills: {len(done.rows)} rows, {len(done.records)} micro-batches, "
        f"{len(done.objects)} objects acknowledged and found"
    )
