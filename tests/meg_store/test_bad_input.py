"""Whatever comes over the wire is answered with a reason; the store stays up and loses nothing."""

from __future__ import annotations

import asyncio
import threading

import pytest
from meg_store.store_harness import (
    GROUP,
    RUN,
    SAMPLE,
    a_group,
    a_record,
    a_run,
    a_sample,
    a_vertex,
    closure,
    ref,
    serving,
)

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.errors import FlexMarlError

NAN, HUGE = float("nan"), b"x" * (9 << 20)
OPEN = common.GROUP_STATUS_OPEN
SPEC = BufferSpec("w", "U8", (8,))


def vertex(call: int = 5, **changes: object) -> graph.Vertex:
    return a_vertex(call, **changes)


def with_column(name: str, **value: object) -> graph.Vertex:
    made = vertex()
    made.payload.columns[name].CopyFrom(graph.ColumnValue(**value))
    return made


def large() -> graph.Vertex:
    made = vertex()
    made.payload.output = HUGE
    return made


def cycle() -> list[graph.Vertex]:
    return [
        vertex(5, upstream_vertex_ids=[f"{SAMPLE}/0:6"]),
        vertex(6, upstream_vertex_ids=[f"{SAMPLE}/0:5"]),
    ]


def releases(reward: float, advantage: float) -> pb.GroupClosure:
    closed = closure(a_vertex(0))
    closed.released[0].reward, closed.released[0].advantage = reward, advantage
    return closed


UNDER_TERMS = {
    # Everything that carries a term, called with an older one; `t` is the current one.
    "WriteGraph": lambda s, t: rows(s, t - 1, vertex()),
    "CloseGroups": lambda s, t: s.close_groups(RUN, [closure(a_vertex(0))], term=t - 1),
    "VoidRows": lambda s, t: s.void_rows(
        RUN, [pb.VoidedRow(row=ref(a_vertex(0)), reason=common.VOID_REASON_OVERLONG)], term=t - 1
    ),
    "WriteColumns": lambda s, t: s.write_columns(
        RUN, [pb.ColumnWrite(row=ref(a_vertex(0)))], term=t - 1
    ),
    "CloseSubgraph": lambda s, t: s.close_subgraph(
        RUN, [pb.ClosedSubgraph(policy="p")], term=t - 1
    ),
    "CreateMicroBatch": lambda s, t: s.create_micro_batch(RUN, a_record(a_vertex(0), term=t - 1)),
    "MarkRows": lambda s, t: s.mark_rows(RUN, "b000000a0-m0000-p", [ref(a_vertex(0))], term=t - 1),
    "SaveState": lambda s, _: s.save_state(RUN, graph.StateRecord(policy="p", term=1)),
    "Commit": lambda s, t: s.commit(RUN, graph.Manifest(term=t - 1), expected_version=None),
    "UpdateRunStatus": lambda s, t: s.update_run_status(RUN, common.RUN_STATUS_RUNNING, term=t - 1),
    "ReturnToWhole": lambda s, t: s.return_to_whole(RUN, term=t - 1),
    "LoseShard": lambda s, t: s.lose_shard(RUN, "s1", term=t - 1),
}


def test_every_mutation_with_a_term_is_tried_with_an_older_one():
    service = pb.DESCRIPTOR.services_by_name["MegStoreService"]
    carried = {
        method.name
        for method in service.methods
        for fields in [method.input_type.fields_by_name]
        if "term" in fields
        or any(
            "term" in field.message_type.fields_by_name
            for field in fields.values()
            if field.message_type is not None and field.name in ("manifest", "state", "micro_batch")
        )
    }
    assert carried == set(UNDER_TERMS)


CASES = {
    "oversized row": ("MESSAGE_TOO_LARGE", lambda s, t: rows(s, t, large())),
    "oversized meta columns": (
        "MESSAGE_TOO_LARGE",
        lambda s, t: rows(
            s, t, vertex(upstream_vertex_ids=[f"{SAMPLE}/0:{n}" for n in range(9000)])
        ),
    ),
    "oversized sample": (
        "MESSAGE_TOO_LARGE",
        lambda s, t: s.write_graph(RUN, term=t, samples=[a_sample(output_json=HUGE)]),
    ),
    "oversized group": (
        "MESSAGE_TOO_LARGE",
        lambda s, t: s.write_graph(RUN, term=t, groups=[a_group(1, query_json=HUGE)]),
    ),
    "oversized configuration": (
        "INVALID_ARGUMENT",
        lambda s, _: s.create_run(a_run(run_id="large", config_json=HUGE)),
    ),
    "unknown column": ("INVALID_ARGUMENT", lambda s, t: rows(s, t, with_column("x", int_value=1))),
    "wrong type": ("INVALID_ARGUMENT", lambda s, t: rows(s, t, with_column("n", bool_value=True))),
    "dangling edge": (
        "INVALID_ARGUMENT",
        lambda s, t: rows(s, t, vertex(upstream_vertex_ids=[f"{SAMPLE}/0:99"])),
    ),
    "edge out of the sample": (
        "INVALID_ARGUMENT",
        lambda s, t: rows(s, t, vertex(upstream_vertex_ids=["b000000a0-g0009-s000a0/0:0"])),
    ),
    "cycle": ("INVALID_ARGUMENT", lambda s, t: rows(s, t, *cycle())),
    "own upstream": (
        "INVALID_ARGUMENT",
        lambda s, t: rows(s, t, vertex(upstream_vertex_ids=[f"{SAMPLE}/0:5"])),
    ),
    "path in an id": ("INVALID_ARGUMENT", lambda s, t: rows(s, t, vertex(path="../../x"))),
    "NUL in a name": ("INVALID_ARGUMENT", lambda s, t: rows(s, t, vertex(agent="a\0b"))),
    "separator in a policy": ("INVALID_ARGUMENT", lambda s, t: rows(s, t, vertex(policy="a/b"))),
    "path for an agent": ("INVALID_ARGUMENT", lambda s, t: rows(s, t, vertex(agent="../a"))),
    "path for a group": (
        "INVALID_ARGUMENT",
        lambda s, t: s.write_graph(RUN, term=t, groups=[a_group(1, group_id="../g")]),
    ),
    "path for a sample": (
        "INVALID_ARGUMENT",
        lambda s, t: s.write_graph(RUN, term=t, samples=[a_sample(sample_id=f"{GROUP}-s0/..")]),
    ),
    "separator in a run": ("INVALID_ARGUMENT", lambda s, _: s.create_run(a_run(run_id="a/b"))),
    "path for a shard": (
        "INVALID_ARGUMENT",
        lambda s, _: s.create_run(
            a_run(run_id="r", shards=[common.ShardAddress(name="../s", address="h:1")])
        ),
    ),
    "path in a scope of terms": (
        "INVALID_ARGUMENT",
        lambda s, _: s.acquire_term(RUN, "policy/../p", holder="x"),
    ),
    "path for a segment": (
        "INVALID_ARGUMENT",
        lambda s, _: s._allocate(RUN, "../w", [SPEC], tier=0, attributes={}),
    ),
    "path for an object": ("INVALID_ARGUMENT", lambda s, _: s.put_object(b"x", key="a/../b")),
    "path for a micro-batch": (
        "INVALID_ARGUMENT",
        lambda s, t: s.mark_rows(RUN, "b000000a0-m/../0", [ref(a_vertex(0))], term=t),
    ),
    "separator in a closed policy": (
        "INVALID_ARGUMENT",
        lambda s, t: s.close_subgraph(RUN, [pb.ClosedSubgraph(policy="a\0b")], term=t),
    ),
    "NaN reward of a sample": (
        "REWARD_INVALID",
        lambda s, t: s.write_graph(
            RUN, term=t, samples=[a_sample(rewards=graph.RewardSet(team=NAN))]
        ),
    ),
    "NaN reward of an agent": (
        "REWARD_INVALID",
        lambda s, t: s.write_graph(
            RUN, term=t, samples=[a_sample(rewards=graph.RewardSet(agents={"solver": NAN}))]
        ),
    ),
    "infinite reward of a vertex": (
        "REWARD_INVALID",
        lambda s, t: s.write_graph(
            RUN,
            term=t,
            samples=[a_sample(rewards=graph.RewardSet(vertices={"v": float("-inf")}))],
        ),
    ),
    "NaN reward of a row": (
        "REWARD_INVALID",
        lambda s, t: s.close_groups(RUN, [releases(NAN, 0.0)], term=t),
    ),
    "infinite advantage": (
        "REWARD_INVALID",
        lambda s, t: s.close_groups(RUN, [releases(0.0, float("inf"))], term=t),
    ),
    "group under its id with other content": (
        "CONTENT_MISMATCH",
        lambda s, t: s.write_graph(RUN, term=t, groups=[a_group(query_json=b"{}")]),
    ),
    "object under its key with other content": (
        "CONTENT_MISMATCH",
        lambda s, _: s.put_object(b"other", key="kept"),
    ),
    "run under its id with other content": (
        "ALREADY_EXISTS",
        lambda s, _: s.create_run(a_run(config_json=b'{"a": 1}')),
    ),
    **{f"older term: {name}": ("TERM_STALE", call) for name, call in UNDER_TERMS.items()},
    "term that was never issued": ("INVALID_ARGUMENT", lambda s, t: rows(s, t + 1, vertex())),
    "request id with another payload": (
        "REQUEST_ID_REUSED",
        lambda s, t: s.write_graph(RUN, term=t, vertices=[vertex()], request_id="taken"),
    ),
    "micro-batch of rows that are not released": (
        "STATE_TRANSITION_REFUSED",
        lambda s, t: s.create_micro_batch(RUN, a_record(a_vertex(0), term=t)),
    ),
    "page token of another query": (
        "INVALID_ARGUMENT",
        lambda s, _: s._call("ListVertices", pb.ListVerticesRequest(run_id=RUN, page_token="AAAA")),
    ),
    "column of a row that is not there": (
        "VERTEX_NOT_FOUND",
        lambda s, t: s.write_columns(
            RUN,
            [pb.ColumnWrite(row=common.VertexRef(vertex_id=f"{SAMPLE}/0:77", agent="solver"))],
            term=t,
        ),
    ),
    "unknown run": ("RUN_NOT_FOUND", lambda s, _: s.describe_agents("nobody")),
    "snapshot outside of its folder": (
        "INVALID_ARGUMENT",
        lambda s, _: s.create_snapshot("../../x"),
    ),
}


def rows(store, term: int, *vertices: graph.Vertex):
    return store.write_graph(RUN, term=term, vertices=vertices)


async def test_bad_input_has_a_reason_and_changes_nothing(opened):
    store = opened[0]
    columns = [graph.Column(name="n", type=graph.COLUMN_TYPE_INT)]
    await store.create_run(a_run(columns=columns))
    for scope in ("orchestrator", "policy/p"):
        await store.acquire_term(RUN, scope, holder="before")
        term = await store.acquire_term(RUN, scope, holder="test")
    await store.write_graph(
        RUN, term=term, groups=[a_group()], vertices=[a_vertex(0)], request_id="taken"
    )
    await store.put_object(b"content", key="kept")
    for name, (reason, call) in CASES.items():
        with pytest.raises(FlexMarlError) as caught:
            await call(store, term)
        assert (name, caught.value.reason.value) == (name, reason)
        assert caught.value.message, name
        left = [v async for v in store.list_vertices(RUN, view=pb.VERTEX_VIEW_FULL)]
        assert left == [a_vertex(0)], name
        assert await store.list_samples(RUN) == [], name
        assert [g.status for g in await store.list_groups(RUN)] == [OPEN], name
    assert [run.run_id for run in await store.list_runs()] == [RUN]
    assert await store.get_object("kept") == b"content"
    assert await store.get_manifest(RUN) is None


async def test_writes_beyond_the_bound_of_queued_bytes_are_refused_and_nothing_else(tmp_path):
    """I13: a disk that hangs pushes back; what was accepted is written once it goes on."""
    async with serving(tmp_path, max_queued_bytes=200_000) as (store, shard):
        await store.create_run(a_run())
        await store.write_graph(RUN, term=0, groups=[a_group()])
        gate = threading.Event()
        write = shard.database.backend.write

        def slow(batches):
            gate.wait(timeout=20)
            write(batches)

        shard.database.backend.write = slow

        async def send(call: int) -> str:
            row = a_vertex(call)
            row.payload.output = b"x" * 50_000
            try:
                await store.write_graph(RUN, term=0, vertices=[row])
            except FlexMarlError as error:
                return error.reason.value
            return "written"

        sent = [asyncio.create_task(send(call)) for call in range(20)]
        await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        gate.set()
        outcomes = await asyncio.gather(*sent)
        assert set(outcomes) == {"written", "QUEUE_FULL"}
        found = [v.meta.path async for v in store.list_vertices(RUN)]
        assert len(found) == outcomes.count("written")
        assert await send(99) == "written"
