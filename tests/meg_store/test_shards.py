"""A run over several stores: routed, fanned out, put together; a store that is down is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from meg_store.store_harness import (
    RUN,
    StoreProcess,
    a_group,
    a_run,
    a_sample,
    a_vertex,
    closure,
    ref_on,
    serving,
    three_shards,
)

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import Buffer, BufferSpec
from flexmarl.client.errors import (
    FlexMarlError,
    InvalidError,
    NotFoundError,
    OutOfRangeError,
    UnavailableError,
)
from flexmarl.client.run_store import RunStore
from flexmarl.client.shard_routes import ROUTES
from flexmarl.core.errors import DomainError

NUM_GROUPS = 12
HOME = {
    # What only the home shard knows; a new call of the store is routed or named here.
    "AcquireTerm", "AllocateSegment", "CloseSegment", "Commit", "CreateMicroBatch",
    "CreateSnapshot", "FetchSegment", "FindWholeVersions", "GetManifest", "GetObject", "GetState",
    "GetStats", "HoldWrites", "ListManifests", "ListMicroBatches", "ListRuns", "LoseShard",
    "OpenSegment", "PinVersion", "PutObject", "ReadSegment", "ReturnToWhole", "SaveState",
    "SealSegment", "StatObject", "UnpinVersion", "UpdateRunStatus",
}  # fmt: skip
BY_METHOD = {"CreateRun", "DeleteRun", "GetRun", "GetSampleGraph", "ListVertices", "Watch"}
"""What `RunStore` does itself: over all shards in an order, or as streams."""


def test_every_call_is_routed_or_the_home_shards():
    service = pb.DESCRIPTOR.services_by_name["MegStoreService"]
    calls = {method.name for method in service.methods}
    assert calls >= ROUTES.keys()
    assert calls - ROUTES.keys() == HOME | BY_METHOD


@pytest_asyncio.fixture
async def sharded(tmp_path) -> AsyncIterator[tuple[RunStore, list]]:
    async with three_shards(tmp_path) as pair:
        yield pair


async def fill(store) -> int:
    """Twelve groups with one sample of two calls each; returns the term."""
    term = await store.acquire_term(RUN, "orchestrator", holder="test")
    groups = [a_group(number) for number in range(NUM_GROUPS)]
    vertices = [
        a_vertex(call, group=number, agent=agent)
        for number in range(NUM_GROUPS)
        for call, agent in enumerate(("solver", "checker"))
    ]
    samples = [a_sample(group=number) for number in range(NUM_GROUPS)]
    response = await store.write_graph(
        RUN, term=term, groups=groups, vertices=vertices, samples=samples
    )
    accepted = [pb.WRITE_OUTCOME_ACCEPTED] * NUM_GROUPS
    assert list(response.vertex_outcomes) == 2 * accepted
    assert list(response.sample_outcomes) == accepted
    return term


class TestRouting:
    async def test_rows_are_spread_and_come_back_as_from_one_store(self, sharded, tmp_path):
        store, _ = sharded
        (tmp_path / "one").mkdir()
        async with serving(tmp_path / "one") as (single, _):
            await single.create_run(a_run())
            for each in (store, single):
                await fill(each)
            assert await store.list_groups(RUN) == await single.list_groups(RUN)
            assert await store.list_samples(RUN, batch=0) == await single.list_samples(RUN, batch=0)
            filters = (
                pb.VertexFilter(),
                pb.VertexFilter(agent="checker", batch=0),
                pb.VertexFilter(group_id=a_group(5).group_id),
                pb.VertexFilter(sample_id=a_sample(group=7).sample_id),
                pb.VertexFilter(group_ids=[a_group(n).group_id for n in (1, 8, 3)]),
                pb.VertexFilter(policy="nobody"),
            )
            for chosen in filters:
                listed = [
                    [v async for v in each.list_vertices(RUN, chosen, page_size=3)]
                    for each in (store, single)
                ]
                assert listed[0] == listed[1]
            assert await store.list_samples(RUN, group_id=a_group(4).group_id) == [
                a_sample(group=4)
            ]
        held = [len(await client.list_groups(RUN)) for client in store.shards.values()]
        assert sum(held) == NUM_GROUPS
        assert all(held)
        with pytest.raises(NotFoundError, match="was not admitted"):
            await store.write_graph(RUN, term=9, vertices=[a_vertex(group=99)])

    async def test_repeated_write_is_answered_in_order(self, sharded):
        store, _ = sharded
        term = await fill(store)
        vertices = [a_vertex(2, group=3), a_vertex(0, group=1), a_vertex(0, group=4, tokens=9)]
        for _ in range(2):
            response = await store.write_graph(RUN, term=term, vertices=vertices, request_id="same")
            assert list(response.vertex_outcomes) == [
                pb.WRITE_OUTCOME_DUPLICATE,  # its sample is over
                pb.WRITE_OUTCOME_UNCHANGED,
                pb.WRITE_OUTCOME_DUPLICATE,
            ]

    async def test_sample_by_id_and_by_prefix(self, sharded):
        store, _ = sharded
        await fill(store)
        sample_id = a_sample(group=6).sample_id
        for asked in (sample_id, sample_id[:-2], sample_id.partition("-s")[0]):
            answer = await store.get_sample_graph(RUN, asked)
            assert answer.sample.sample_id == sample_id
            assert len(answer.vertices) == 2
        with pytest.raises((InvalidError, DomainError), match=r"several samples .*: b000000a0"):
            await store.get_sample_graph(RUN, "b000000a0-g00")
        for asked in ("b000007", a_sample(group=77).sample_id):
            with pytest.raises(DomainError, match="no sample"):
                await store.get_sample_graph(RUN, asked)

    async def test_release_mark_and_account_over_shards(self, sharded):
        store, _ = sharded
        term = await fill(store)
        vertices = [a_vertex(0, group=number) for number in range(NUM_GROUPS)]
        second = [a_vertex(1, group=n, agent="checker") for n in range(NUM_GROUPS)]
        closures = []
        for number, vertex in enumerate(vertices):
            end = closure(vertex, group=number)
            end.released[0].row.shard = store.shard_of(vertex.meta.group_id)
            closures.append(end)
        await store.close_groups(RUN, closures, term=term)
        rows = [ref_on(store, vertex) for vertex in vertices]
        record = graph.MicroBatch(
            micro_batch_id="b000000a0-m0000-p", policy="p", rows=rows, term=term
        )
        await store.create_micro_batch(RUN, record)
        await store.mark_rows(RUN, record.micro_batch_id, rows, term=term)
        reason = common.VOID_REASON_NO_REWARD
        voided = [pb.VoidedRow(row=ref_on(store, vertex), reason=reason) for vertex in second]
        await store.void_rows(RUN, voided[1:], term=term)
        counts = await store.count_vertices(
            RUN, batch=0, batch_attempt=0, consumed=[record.micro_batch_id]
        )
        account = counts.policies["p"]
        assert (account.finished, account.consumed) == (2 * NUM_GROUPS, NUM_GROUPS)
        assert dict(account.voided) == {"no_reward": NUM_GROUPS - 1}
        assert list(counts.open_rows) == [ref_on(store, second[0])]
        read = await store.get_vertices(RUN, rows, view=pb.VERTEX_VIEW_META)
        assert [v.meta.vertex_id for v in read] == [ref.vertex_id for ref in rows]
        assert {v.meta.micro_batch_id for v in read} == {record.micro_batch_id}

    async def test_closed_subgraph_is_closed_everywhere(self, sharded):
        store, _ = sharded
        term = await fill(store)
        groups = [a_group(number) for number in range(20, 26)]
        await store.write_graph(RUN, term=term, groups=groups)
        await store.close_subgraph(RUN, [pb.ClosedSubgraph(policy="p")], term=term)
        for number in range(20, 26):
            vertex = a_vertex(group=number)
            response = await store.write_graph(RUN, term=term, vertices=[vertex])
            assert list(response.vertex_outcomes) == [pb.WRITE_OUTCOME_SUBGRAPH_CLOSED]

    async def test_rows_of_unknown_shards_are_refused(self, sharded):
        store, _ = sharded
        await fill(store)
        lost = common.VertexRef(shard="s9", vertex_id=a_vertex().meta.vertex_id, agent="solver")
        with pytest.raises(DomainError, match="has no store shard 's9'"):
            await store.get_vertices(RUN, [lost])

    async def test_terms_and_manifests_are_the_home_shards(self, sharded):
        store, _ = sharded
        await fill(store)
        other = store.shards["s1"]
        with pytest.raises(FlexMarlError, match="ask its home shard 's0'"):
            await other.acquire_term(RUN, "orchestrator", holder="x")
        newer = await store.acquire_term(RUN, "orchestrator", holder="next")
        await store.write_graph(RUN, term=newer, groups=[a_group(n) for n in range(30, 40)])
        with pytest.raises(FlexMarlError, match="TERM_STALE"):
            await store.write_graph(RUN, term=newer - 1, groups=[a_group(n) for n in range(30, 40)])

    async def test_run_is_found_and_deleted_by_its_home_address(self, sharded):
        store, shards = sharded
        dataset = await store.put_object(b"rows")
        other = a_run(run_id="other", dataset=dataset, shards=store.addresses)
        await store.create_run(other)
        async with RunStore.connect(store.address, patience_s=2.0) as found:
            assert (await found.get_run("other")).shards == other.shards
            assert set(found.shards) == {"s0", "s1", "s2"}
            await found.delete_run("other")
            await found.delete_run("other")
        for shard in shards:
            assert shard.runs.ids() == [RUN]
        assert shards[0].objects.require(dataset.key).reference_count == 0


class TestWatch:
    async def test_events_of_all_shards_and_one_cursor(self, sharded):
        store, _ = sharded
        await fill(store)
        seen: list[str] = []
        after = ""
        while len(seen) < NUM_GROUPS:  # a consumer that is killed after every answer
            async with aclosing(
                store.watch(RUN, after=after, kinds=[pb.EVENT_KIND_SAMPLE])
            ) as watched:
                news = await anext(watched)
            after = news.cursor
            seen += [event.sample.sample_id for event in news.events]
        assert sorted(seen) == [a_sample(group=n).sample_id for n in range(NUM_GROUPS)]
        with pytest.raises(ValueError, match="is not of a watch"):
            await anext(store.watch(RUN, after="7"))

    async def test_forgotten_events_of_one_shard_say_where_to_restart(self, tmp_path):
        async with three_shards(tmp_path, max_events=1024) as (store, _):
            async with aclosing(store.watch(RUN)) as watched:
                news = await anext(watched)
                while any(position == "0" for position in _positions(news.cursor)):
                    news = await anext(watched)
            for first in range(0, 9000, 500):
                groups = [a_group(number) for number in range(first, first + 500)]
                await store.write_graph(RUN, term=0, groups=groups)
            with pytest.raises(OutOfRangeError) as refused:
                while True:
                    await anext(store.watch(RUN, after=news.cursor))
            restart = refused.value.metadata["restart"]
            assert refused.value.metadata["shard"] in store.shards
            for _ in range(3):  # the two others may have forgotten theirs, too
                try:
                    async with aclosing(store.watch(RUN, after=restart)) as watched:
                        for _ in range(6):
                            await anext(watched)
                    break
                except OutOfRangeError as error:
                    restart = error.metadata["restart"]
            else:
                raise AssertionError("no restart is behind what all shards have forgotten")


def _positions(cursor: str) -> list[str]:
    return [part.partition("=")[2] for part in cursor.split(",")]


class TestSegments:
    async def test_state_of_another_node_is_streamed_both_ways(self, sharded, tmp_path):
        store, shards = sharded
        buffer = Buffer(BufferSpec("w", "U8", (100_000,)), memoryview(bytes([5]) * 100_000))
        for name in ("s0", "s2"):  # as if this process were on their nodes
            shards[int(name[1])].node.path.write_text("somebody else's")
        ref = await store.set(RUN, "w", [buffer])
        assert ref.shard == "s0"
        async with store.get(RUN, "w") as reader:
            assert reader.object.shard == "s1"
            assert bytes(reader.buffers["w"].data[:3]) == b"\5\5\5"
        for shard in (shards[0], shards[1]):
            assert shard.segments.find("w") is not None
        await store.set(RUN, "w2", [buffer])
        shards[1].node.path.write_text("somebody else's")
        async with RunStore.over(store.addresses, patience_s=2.0) as elsewhere:
            with pytest.raises(DomainError, match="shares its memory tier with this node"):
                await elsewhere.get(RUN, "w2")


class Stores:
    """Real store processes, one per shard."""

    def __init__(self, folder: Path, number: int) -> None:
        self.processes = {}
        for name in (f"s{n}" for n in range(number)):
            (folder / name).mkdir()
            self.processes[name] = StoreProcess(folder / name, f"store.shard={name}")

    async def start(self) -> list[common.ShardAddress]:
        addresses = await asyncio.gather(*(p.start() for p in self.processes.values()))
        return [
            common.ShardAddress(name=name, address=address)
            for name, address in zip(self.processes, addresses, strict=True)
        ]

    def clean(self) -> None:
        for process in self.processes.values():
            process.clean()


@pytest.mark.parametrize("number", [2, 3])
async def test_store_that_is_down_is_named_and_waited_for(tmp_path, number):
    stores = Stores(tmp_path, number)
    try:
        shards = await stores.start()
        async with RunStore.over(shards, patience_s=20.0, shard_patience_s=0.3) as store:
            await store.create_run(a_run(shards=shards))
            term = await fill(store)
            stores.processes["s1"].kill()
            with pytest.raises(UnavailableError, match="store shard 's1'") as refused:
                await store.list_samples(RUN)
            assert refused.value.metadata["shard"] == "s1"
            for missing in (
                store.count_vertices(RUN, batch=0, batch_attempt=0, consumed=[]),
                anext(store.list_vertices(RUN)),
                _watch_all(store),
            ):
                with pytest.raises(UnavailableError, match="s1"):
                    await missing
            # What does not need it goes on.
            groups = [a_group(n) for n in range(50, 70)]
            others = [g for g in groups if store.shard_of(g.group_id) != "s1"]
            await store.write_graph(RUN, term=term, groups=others)
        async with RunStore.over(shards, patience_s=50.0) as store:
            waiting = asyncio.create_task(store.list_groups(RUN))
            watched = asyncio.create_task(_watch_all(store, samples=NUM_GROUPS))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await stores.processes["s1"].start()
            assert len(await waiting) == NUM_GROUPS + len(others)
            assert await watched == [a_sample(group=n).sample_id for n in range(NUM_GROUPS)]
            await store.write_graph(RUN, term=term, groups=groups)
            assert len(await store.list_groups(RUN)) == NUM_GROUPS + len(groups)
    finally:
        stores.clean()


async def _watch_all(store, *, samples: int = 10**9) -> list[str]:
    seen: list[str] = []
    async with aclosing(store.watch(RUN, kinds=[pb.EVENT_KIND_SAMPLE])) as watched:
        async for news in watched:
            seen += [event.sample.sample_id for event in news.events]
            if len(seen) >= samples:
                break
    return sorted(seen)
