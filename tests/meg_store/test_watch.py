"""Watch: in order, without gap, bounded, resumable."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from meg_store.store_harness import RUN, a_group, a_run, a_sample, a_vertex, serving

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.errors import FlexMarlError
from flexmarl.client.store import StoreClient
from flexmarl.meg_store import event_log


async def collect(store, count: int, **options) -> list[pb.Event]:
    events: list[pb.Event] = []
    async with aclosing(store.watch(RUN, **options)) as responses:
        async for response in responses:
            events.extend(response.events)
            if len(events) >= count:
                return events
    raise AssertionError("a watch has no end")


async def admit(store, first: int, count: int) -> None:
    await store.write_graph(RUN, term=0, groups=[a_group(n) for n in range(first, first + count)])


async def test_log_then_live_in_order(store):
    await admit(store, 0, 2)
    watch = asyncio.create_task(collect(store, 6))
    await asyncio.sleep(0.05)
    await store.write_graph(RUN, term=0, groups=[a_group(2)], samples=[a_sample()])
    await store.write_graph(RUN, term=0, vertices=[a_vertex(group=1)], samples=[a_sample(group=1)])
    events = await watch
    assert [e.cursor for e in events] == [1, 2, 3, 4, 5, 6]
    kinds = [e.WhichOneof("subject") for e in events]
    assert kinds == ["run", "group", "group", "group", "sample", "sample"]
    assert not events[1].group.query_json
    assert not events[0].run.config_json


async def test_kinds_are_filtered_and_the_cursor_moves_on(store):
    await admit(store, 0, 5)
    await store.write_graph(RUN, term=0, samples=[a_sample()])
    await admit(store, 5, 5)
    watch = store.watch(RUN, kinds=[pb.EVENT_KIND_SAMPLE])
    responses = [await anext(watch) for _ in range(2)]
    assert [e.sample.group_id for e in responses[0].events] == [a_group(0).group_id]
    assert not responses[1].events
    assert responses[1].cursor == "12"
    await watch.aclose()


async def test_long_stretch_of_other_kinds_is_passed_over(store):
    for first in range(0, 6000, 500):
        await admit(store, first, 500)
    await store.write_graph(RUN, term=0, samples=[a_sample()])
    events = await collect(store, 1, kinds=[pb.EVENT_KIND_SAMPLE])
    assert [e.cursor for e in events] == [6002]


async def test_unchanged_writes_make_no_events(store):
    for _ in range(2):
        await store.write_graph(RUN, term=0, groups=[a_group()], samples=[a_sample()])
    assert len(await collect(store, 3)) == 3
    assert (await anext(store.watch(RUN, after="3"))).cursor == "3"


async def test_vertices_are_events_where_the_run_says_so(opened):
    store = opened[0]
    await store.create_run(a_run(run_id="quiet"))
    with pytest.raises(FlexMarlError, match="created without vertex_events"):
        await anext(store.watch("quiet", kinds=[pb.EVENT_KIND_VERTEX]))
    await store.create_run(a_run(vertex_events=True))
    await admit(store, 0, 1)
    vertices = [a_vertex(0), a_vertex(1)]
    await store.write_graph(RUN, term=0, vertices=vertices, samples=[a_sample()])
    events = await collect(store, 2, kinds=[pb.EVENT_KIND_VERTEX])
    assert [event.vertex for event in events] == [vertex.meta for vertex in vertices]
    assert [event.kind for event in await collect(store, 5)][-1] == pb.EVENT_KIND_SAMPLE


async def test_sign_of_life_without_events(store):
    response = await asyncio.wait_for(anext(store.watch(RUN, after="1")), timeout=20)
    assert not response.events
    assert response.cursor == "1"


async def test_cursor_that_was_never_given_out_is_refused(store):
    with pytest.raises(FlexMarlError, match="CURSOR_OUT_OF_RANGE"):
        await anext(store.watch(RUN, after="99"))


async def test_old_events_are_forgotten_and_their_cursors_refused(tmp_path):
    async with serving(tmp_path, max_events=1024) as (store, _):
        await store.create_run(a_run())
        for first in range(0, 3000, 500):
            await admit(store, first, 500)
        with pytest.raises(FlexMarlError, match="CURSOR_OUT_OF_RANGE") as refused:
            await anext(store.watch(RUN, after="5"))
        oldest = await anext(store.watch(RUN))
        again = await anext(store.watch(RUN, after=refused.value.metadata["restart"]))
        assert again.events[0] == oldest.events[0]
        assert oldest.events[0].cursor > 900
        newest = await collect(store, 3, after="2998")
        assert [e.cursor for e in newest] == [2999, 3000, 3001]


async def test_slow_watcher_reads_the_log_and_misses_nothing(store):
    watch = store.watch(RUN)
    seen = list((await anext(watch)).events)
    for first in range(0, 6000, 500):  # more than the recent events kept in memory
        await admit(store, first, 500)
    while len(seen) < 6001:
        seen.extend((await anext(watch)).events)
    await watch.aclose()
    assert [e.cursor for e in seen] == list(range(1, 6002))


async def test_recent_events_are_bounded_in_bytes_and_the_rest_is_read_from_the_log(
    opened, monkeypatch
):
    monkeypatch.setattr(event_log, "_TAIL_BYTES", 4000)
    store, shard = opened
    await store.create_run(a_run())
    await admit(store, 0, 100)
    log = shard.database.events.of(RUN)
    assert 0 < log._tail_bytes <= 4000
    await store.write_graph(RUN, term=0, samples=[a_sample(output_json=b"x" * 5000)])
    assert log._tail_bytes == 0
    await admit(store, 100, 2)
    assert [e.cursor for e in await collect(store, 104)] == list(range(1, 105))


async def test_watch_goes_on_over_a_restart_of_the_store(process):
    async with StoreClient.connect(await process.start(), patience_s=20) as store:
        await store.create_run(a_run())
        watch = store.watch(RUN)
        cursors = [e.cursor for e in (await anext(watch)).events]
        for round_ in range(2):
            await admit(store, 10 * round_, 10)
            process.kill()
            await process.start()
            await admit(store, 10 * round_ + 5, 10)
        while len(cursors) < 26:
            cursors.extend(e.cursor for e in (await anext(watch)).events)
        await watch.aclose()
    assert cursors == list(range(1, 27))
