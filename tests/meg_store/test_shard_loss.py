"""LoseShard: what the home shard keeps of a shard that is lost, and how it counts."""

from __future__ import annotations

import pytest
from meg_store.store_harness import RUN, a_group, a_run, a_sample, a_vertex, serving

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.errors import ConflictError, InvalidError, NotFoundError
from flexmarl.client.run_store import RunStore

SHARDS = [common.ShardAddress(name="s0", address="h:1"), common.ShardAddress(name="s1")]


@pytest.fixture
async def home(tmp_path):
    async with serving(tmp_path) as (store, _):
        await store.create_run(a_run(shards=SHARDS))
        yield store


def gone(ordinal: int, **lost_rows: int) -> graph.Group:
    return a_group(
        ordinal,
        status=common.GROUP_STATUS_DROPPED,
        drop_reason=common.VOID_REASON_GROUP_DROPPED,
        lost_shard="s1",
        lost_rows=lost_rows,
    )


async def test_groups_that_went_are_kept_dropped_and_their_rows_count(home):
    term = await home.acquire_term(RUN, "orchestrator", holder="test")
    vertex = a_vertex()
    await home.write_graph(
        RUN, term=term, groups=[a_group()], vertices=[vertex], samples=[a_sample()]
    )
    refs = [
        common.VertexRef(
            shard="s1", vertex_id=f"{a_group(7).group_id}-s000a0/0:{n}", agent="solver"
        )
        for n in range(3)
    ]
    record = graph.MicroBatch(micro_batch_id="b000000a0-m0000-p", policy="p", rows=refs, term=term)
    await home.create_micro_batch(RUN, record)
    for _ in range(2):  # recorded once
        run = await home.lose_shard(RUN, "s1", term=term, groups=[gone(7, p=2), gone(8)])
        assert run.lost_shards == ["s1"]
    counts = await home.count_vertices(
        RUN, batch=0, batch_attempt=0, consumed=[record.micro_batch_id]
    )
    account = counts.policies["p"]
    assert (account.finished, account.consumed) == (1 + 2 + 3, 3)
    assert dict(account.voided) == {"group_dropped": 2}
    assert [ref.vertex_id for ref in counts.open_rows] == [vertex.meta.vertex_id]
    groups = await home.list_groups(RUN, batch=0)
    assert [g.lost_shard for g in groups] == ["", "s1", "s1"]


async def test_group_that_comes_again_opens_the_subgraphs_of_its_batch(home):
    term = await home.acquire_term(RUN, "orchestrator", holder="test")
    await home.write_graph(RUN, term=term, groups=[a_group(), a_group(1)])
    mark = pb.ClosedSubgraph(policy="p")
    await home.close_subgraph(RUN, [pb.ClosedSubgraph(policy="q"), mark], term=term)
    late = [a_vertex(group=1)]
    refused = await home.write_graph(RUN, term=term, vertices=late)
    assert list(refused.vertex_outcomes) == [pb.WRITE_OUTCOME_SUBGRAPH_CLOSED]
    await home.lose_shard(RUN, "s1", term=term, groups=[gone(7)])
    again = a_group(8, replaces_group_id=a_group(7).group_id, repeats_query=True)
    written = await home.write_graph(
        RUN, term=term, groups=[again], vertices=[a_vertex(group=8)], samples=[a_sample(group=8)]
    )
    assert list(written.vertex_outcomes) == [pb.WRITE_OUTCOME_ACCEPTED]
    # Closed again, and an admission that is repeated changes nothing.
    await home.close_subgraph(RUN, [mark], term=term)
    refused = await home.write_graph(RUN, term=term, groups=[again], vertices=late)
    assert list(refused.vertex_outcomes) == [pb.WRITE_OUTCOME_SUBGRAPH_CLOSED]


async def test_group_that_went_after_its_batch_was_trained_is_kept_closed(home):
    term = await home.acquire_term(RUN, "orchestrator", holder="test")
    closed = a_group(7, status=common.GROUP_STATUS_CLOSED, lost_shard="s1", lost_rows={"p": 1})
    await home.lose_shard(RUN, "s1", term=term, groups=[closed])
    counts = await home.count_vertices(RUN, batch=0, batch_attempt=0, consumed=[])
    assert dict(counts.policies["p"].voided) == {"group_dropped": 1}
    opened = a_group(8, lost_shard="s1")
    with pytest.raises(InvalidError, match="has ended"):
        await home.lose_shard(RUN, "s1", term=term, groups=[opened])


async def test_what_cannot_be_lost_is_refused(home):
    with pytest.raises(InvalidError, match="its home shard"):
        await home.lose_shard(RUN, "s0")
    with pytest.raises(NotFoundError, match="SHARD_NOT_FOUND"):
        await home.lose_shard(RUN, "s9")
    term = await home.acquire_term(RUN, "orchestrator", holder="test")
    with pytest.raises(InvalidError, match="did not go with"):
        await home.lose_shard(RUN, "s1", term=term, groups=[a_group(3)])
    await home.acquire_term(RUN, "orchestrator", holder="next")
    with pytest.raises(ConflictError, match="TERM_STALE"):
        await home.lose_shard(RUN, "s1", term=term, groups=[gone(3)])
    assert not (await home.get_run(RUN)).lost_shards


async def test_clients_ask_a_lost_shard_no_more(home):
    await home.lose_shard(RUN, "s1")
    async with RunStore.connect(home.address, patience_s=2.0) as store:
        await store.get_run(RUN)
        assert (list(store.shards), list(store.lost)) == (["s0"], ["s1"])
        assert await store.list_groups(RUN) == []
        assert {store.shard_of(a_group(number).group_id) for number in range(20)} == {"s0"}
        was_there = [store.was_on(a_group(number).group_id, "s1") for number in range(20)]
        assert 0 < sum(was_there) < 20
