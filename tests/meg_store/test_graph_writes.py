"""WriteGraph: outcomes, validation, fencing, atomicity."""

from __future__ import annotations

import math

import pytest
from meg_store.store_harness import (
    GROUP,
    RUN,
    SAMPLE,
    a_group,
    a_run,
    a_sample,
    a_vertex,
    closure,
    ref,
)

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.errors import FlexMarlError
from flexmarl.client.request import new_request_id
from flexmarl.meg_store import wire

WRITE_GRAPH = "/flexmarl.api.meg_store.v1.MegStoreService/WriteGraph"
ACCEPTED, UNCHANGED, DUPLICATE = (
    pb.WRITE_OUTCOME_ACCEPTED,
    pb.WRITE_OUTCOME_UNCHANGED,
    pb.WRITE_OUTCOME_DUPLICATE,
)


async def outcomes(store, term, *vertices):
    response = await store.write_graph(RUN, term=term, vertices=vertices)
    return list(response.vertex_outcomes)


async def refusal(awaitable) -> str:
    with pytest.raises(FlexMarlError) as caught:
        await awaitable
    return caught.value.reason.value


async def test_rows_come_back_as_written(store, term):
    first, second = a_vertex(0), a_vertex(1, upstream_vertex_ids=[f"{SAMPLE}/0:0"])
    written = await store.write_graph(
        RUN, term=term, groups=[a_group()], vertices=[first, second], samples=[a_sample()]
    )
    assert list(written.vertex_outcomes) == [ACCEPTED, ACCEPTED]
    assert list(written.sample_outcomes) == [ACCEPTED]
    found = await store.get_vertices(RUN, [ref(second), ref(first)])
    assert list(found) == [second, first]
    metas = await store.get_vertices(RUN, [ref(first)], view=pb.VERTEX_VIEW_META)
    assert metas[0].meta == first.meta
    assert not metas[0].HasField("payload")


async def test_log_probabilities_and_numbers_keep_every_digit(store, term):
    """G5: neither a float32 nor JSON's numbers in between."""
    vertex = a_vertex(0)
    vertex.payload.logprobs[0] = -1.2345678901234567
    vertex.meta.finished_unix_ns = 2**63 - 1
    await store.write_graph(RUN, term=term, groups=[a_group()], vertices=[vertex])
    (found,) = await store.get_vertices(RUN, [ref(vertex)])
    assert found.payload.logprobs[0] == -1.2345678901234567
    assert found.meta.finished_unix_ns == 2**63 - 1


async def test_late_result_is_recorded_and_never_used(opened, store, term):
    """B3, B4: the first result stays; a later attempt is a duplicate."""
    await store.write_graph(RUN, term=term, groups=[a_group()])
    cut = a_vertex(0, status=common.VERTEX_STATUS_CANCELLED)
    assert await outcomes(store, term, cut) == [ACCEPTED]
    assert await outcomes(store, term, cut) == [UNCHANGED]
    late = a_vertex(0, attempt=2)
    assert await outcomes(store, term, late, late) == [DUPLICATE, DUPLICATE]
    assert list(await store.get_vertices(RUN, [ref(cut)])) == [cut]
    assert (await store.get_stats()).numbers["late_results"] == 2


async def test_a_call_that_is_stored_for_one_agent_is_late_for_another(store, term):
    await store.write_graph(RUN, term=term, groups=[a_group()])
    other = a_vertex(0, agent="judge")
    assert await outcomes(store, term, a_vertex(0), other) == [ACCEPTED, DUPLICATE]
    assert await outcomes(store, term, other) == [DUPLICATE]
    assert [v.meta.agent async for v in store.list_vertices(RUN)] == ["solver"]


async def test_same_row_twice_in_one_call_is_written_once(store, term):
    await store.write_graph(RUN, term=term, groups=[a_group()])
    assert await outcomes(store, term, a_vertex(), a_vertex()) == [ACCEPTED, UNCHANGED]


async def test_row_of_an_ended_sample_or_group_is_late(store, term):
    await store.write_graph(RUN, term=term, groups=[a_group(0), a_group(1)], samples=[a_sample()])
    assert await outcomes(store, term, a_vertex(0)) == [DUPLICATE]
    assert await outcomes(store, term, a_vertex(0, group=1)) == [ACCEPTED]
    await store.close_groups(RUN, [closure(a_vertex(0, group=1), group=1)], term=term)
    assert await outcomes(store, term, a_vertex(1, group=1)) == [DUPLICATE]
    response = await store.write_graph(RUN, term=term, samples=[a_sample(group=1)])
    assert list(response.sample_outcomes) == [DUPLICATE]
    assert [s.sample_id for s in await store.list_samples(RUN)] == [SAMPLE]


@pytest.mark.parametrize("late", [common.SAMPLE_STATUS_DONE, common.SAMPLE_STATUS_CANCELLED])
async def test_a_sample_whose_group_ended_before_it_ends_cancelled(store, term, late):
    """Its own end came too late to count; that it is over is true nevertheless."""
    opened = a_sample(common.SAMPLE_STATUS_OPEN)
    await store.write_graph(RUN, term=term, groups=[a_group()], samples=[opened])
    await store.close_groups(RUN, [closure()], term=term)
    ended = a_sample(late, num_vertices=3, finished_unix_ns=5)
    for _ in range(2):
        response = await store.write_graph(RUN, term=term, samples=[ended])
        assert list(response.sample_outcomes) == [DUPLICATE]
        [stored] = await store.list_samples(RUN)
        assert stored.status == common.SAMPLE_STATUS_CANCELLED
        assert (stored.num_vertices, stored.finished_unix_ns) == (0, 5)


async def test_identical_rewrite_after_closure_is_unchanged(store, term):
    await store.write_graph(RUN, term=term, groups=[a_group()], vertices=[a_vertex()])
    await store.close_groups(RUN, [closure(a_vertex())], term=term)
    assert await outcomes(store, term, a_vertex()) == [UNCHANGED]


async def test_ended_sample_is_final(store, term):
    await store.write_graph(
        RUN, term=term, groups=[a_group()], samples=[a_sample(common.SAMPLE_STATUS_OPEN)]
    )
    failed = a_sample(common.SAMPLE_STATUS_FAILED)
    for expected in (ACCEPTED, UNCHANGED):
        response = await store.write_graph(RUN, term=term, samples=[failed])
        assert list(response.sample_outcomes) == [expected]
    response = await store.write_graph(RUN, term=term, samples=[a_sample()])
    assert list(response.sample_outcomes) == [DUPLICATE]
    assert (await store.list_samples(RUN))[0].status == common.SAMPLE_STATUS_FAILED


async def test_what_an_open_sample_has_left_only_grows_and_is_told(store, term):
    opened = a_sample(common.SAMPLE_STATUS_OPEN)
    left = a_sample(common.SAMPLE_STATUS_OPEN, left_policies=["p"], used_policies=["q"])
    more = a_sample(common.SAMPLE_STATUS_OPEN, left_policies=["r"])
    await store.write_graph(RUN, term=term, groups=[a_group()])
    seen = []
    # A dispatcher that was started anew admits the sample as if nothing had happened.
    for sample in (opened, left, opened, left, more):
        response = await store.write_graph(RUN, term=term, samples=[sample])
        seen.extend(response.sample_outcomes)
    assert seen == [ACCEPTED, ACCEPTED, UNCHANGED, UNCHANGED, ACCEPTED]
    (stored,) = await store.list_samples(RUN)
    assert list(stored.left_policies) == ["p", "r"]
    assert list(stored.used_policies) == ["q"]
    response = await anext(store.watch(RUN, kinds=[pb.EVENT_KIND_SAMPLE]))
    told = [list(event.sample.left_policies) for event in response.events]
    assert told == [[], ["p"], ["p", "r"]]


async def test_older_term_is_refused_and_nothing_is_written(store, term):
    await store.write_graph(RUN, term=term, groups=[a_group()])
    await store.acquire_term(RUN, "orchestrator", holder="next")
    assert await refusal(outcomes(store, term, a_vertex())) == "TERM_STALE"
    assert await refusal(outcomes(store, 9, a_vertex())) == "INVALID_ARGUMENT"
    assert await refusal(store.get_vertices(RUN, [ref(a_vertex())])) == "VERTEX_NOT_FOUND"


async def test_one_bad_row_refuses_the_whole_call(store, term):
    await store.write_graph(RUN, term=term, groups=[a_group()])
    bad = a_vertex(1, upstream_vertex_ids=["nowhere/0:0"])
    assert await refusal(outcomes(store, term, a_vertex(0), bad)) == "INVALID_ARGUMENT"
    assert await refusal(store.get_vertices(RUN, [ref(a_vertex())])) == "VERTEX_NOT_FOUND"
    assert await outcomes(store, term, a_vertex(0)) == [ACCEPTED]


async def test_closed_subgraph_takes_no_new_rows(store, term):
    await store.write_graph(RUN, term=term, groups=[a_group()], vertices=[a_vertex(0)])
    mark = pb.ClosedSubgraph(batch=0, batch_attempt=0, policy="p")
    await store.close_subgraph(RUN, [mark], term=term)
    await store.close_subgraph(RUN, [mark], term=term)
    refused, other = await outcomes(store, term, a_vertex(1), a_vertex(2, policy="q"))
    assert (refused, other) == (pb.WRITE_OUTCOME_SUBGRAPH_CLOSED, ACCEPTED)
    assert await refusal(store.get_vertices(RUN, [ref(a_vertex(1))])) == "VERTEX_NOT_FOUND"
    assert await outcomes(store, term, a_vertex(0)) == [UNCHANGED]
    assert await outcomes(store, term, a_vertex(0, attempt=2)) == [DUPLICATE]
    assert await outcomes(store, term, a_vertex(1, policy="q")) == [ACCEPTED]


async def test_group_must_be_admitted_and_is_admitted_once(store, term):
    assert await refusal(outcomes(store, term, a_vertex())) == "NOT_FOUND"
    for _ in range(2):
        await store.write_graph(RUN, term=term, groups=[a_group()])
    other = store.write_graph(RUN, term=term, groups=[a_group(num_samples=9)])
    assert await refusal(other) == "CONTENT_MISMATCH"
    assert [g.group_id for g in await store.list_groups(RUN, batch=0)] == [GROUP]


@pytest.mark.parametrize(
    "meta",
    [
        {"vertex_id": "../../etc/passwd"},
        {"path": "0:0/../1"},
        {"agent": "a/b"},
        {"agent": ""},
        {"policy": "x\0y"},
        {"policy": ""},
        {"kind": common.VERTEX_KIND_UNSPECIFIED},
        {"status": common.VERTEX_STATUS_RUNNING},
        {"status": common.VERTEX_STATUS_UNSPECIFIED},
        {"group_id": "b000000a0-g0009"},
        {"batch": 1},
        {"sample_attempt": 1},
        {"advantage": 1.0},
        {"reward": math.nan},
        {"micro_batch_id": "m"},
        {"void_reason": common.VOID_REASON_NO_REWARD},
        {"num_response_tokens": 3},
        {"version_runs": [common.VersionRun(version=0, num_tokens=1)]},
        {"upstream_vertex_ids": [f"{SAMPLE}/0:0"]},
    ],
    ids=lambda meta: next(iter(meta)),
)
async def test_malformed_vertex_is_refused(store, term, meta):
    await store.write_graph(RUN, term=term, groups=[a_group()])
    assert await refusal(outcomes(store, term, a_vertex(**meta))) == "INVALID_ARGUMENT"


async def test_text_that_is_not_utf8_is_refused_not_an_internal_error(opened):
    client = opened[0]
    payload = b"\x0a\x02\xed\xa0"  # request_id: half of a surrogate
    raw = client._channel.unary_unary(WRITE_GRAPH, lambda data: data)
    assert await refusal(raw(payload)) == "INVALID_ARGUMENT"


async def write_raw(store, meta: bytes, payload: bytes) -> list[int]:
    """Write a vertex of these bytes."""
    vertex = wire.vertex(meta, payload)
    request = pb.WriteGraphRequest(request_id=new_request_id(), run_id=RUN)
    number = pb.WriteGraphRequest.DESCRIPTOR.fields_by_name["vertices"].number
    call = store._channel.unary_unary(WRITE_GRAPH)
    answered = await call(request.SerializeToString() + wire.field(number, vertex))
    return list(pb.WriteGraphResponse.FromString(answered).vertex_outcomes)


async def test_same_content_in_other_bytes_is_unchanged(opened):
    """Payloads are kept as they came: equal ones need not be the same bytes."""
    store = opened[0]
    await store.create_run(a_run())
    await store.write_graph(RUN, term=0, groups=[a_group()])
    vertex = a_vertex(tokens=3)
    meta, payload = vertex.meta.SerializeToString(), vertex.payload
    halves = [graph.VertexPayload(), graph.VertexPayload()]
    halves[0].logprobs.extend(payload.logprobs)  # of the later field
    halves[1].CopyFrom(payload)
    halves[1].ClearField("logprobs")
    swapped = b"".join(half.SerializeToString() for half in halves)
    assert swapped != payload.SerializeToString()
    assert await write_raw(store, meta, swapped) == [ACCEPTED]
    assert await outcomes(store, 0, vertex) == [UNCHANGED]
    assert list(await store.get_vertices(RUN, [ref(vertex)])) == [vertex]
    vertex.payload.temperature += 1
    assert await outcomes(store, 0, vertex) == [DUPLICATE]


async def test_payload_that_is_none_is_refused_not_an_internal_error(opened):
    store = opened[0]
    await store.create_run(a_run())
    await store.write_graph(RUN, term=0, groups=[a_group()])
    vertex = a_vertex()
    torn = vertex.payload.SerializeToString()[:-1]
    written = write_raw(store, vertex.meta.SerializeToString(), torn)
    assert await refusal(written) == "INVALID_ARGUMENT"
    # Without a payload nothing is said of its tokens; an empty one says that there are none.
    bare = graph.Vertex(meta=vertex.meta)
    assert await outcomes(store, 0, bare) == [ACCEPTED]
    empty = graph.Vertex(meta=a_vertex(1).meta, payload=graph.VertexPayload())
    assert await refusal(outcomes(store, 0, empty)) == "INVALID_ARGUMENT"


async def test_large_call_is_checked_in_slices_and_refused_like_a_small_one(store, term):
    await store.write_graph(RUN, term=term, groups=[a_group()])
    rows = [a_vertex(call, tokens=2000) for call in range(40)]  # of several slices
    rows[30].meta.policy = ""
    with pytest.raises(FlexMarlError, match=r"0:30.*names its policy") as caught:
        await outcomes(store, term, *rows)
    assert caught.value.reason.value == "INVALID_ARGUMENT"
    assert [v async for v in store.list_vertices(RUN)] == []
    rows[30].meta.policy = rows[0].meta.policy
    assert await outcomes(store, term, *rows) == [ACCEPTED] * 40
    asked = [*rows, *reversed(rows)] * 4  # of several slices, too
    found = await store.get_vertices(RUN, [ref(row) for row in asked])
    assert list(found) == asked
    unknown = store.get_vertices(RUN, [*(ref(row) for row in asked), ref(a_vertex(99))])
    assert await refusal(unknown) == "VERTEX_NOT_FOUND"
    late = await refusal(outcomes(store, term - 1, *rows[:30], a_vertex(0, kind=0)))
    assert late == "TERM_STALE"  # before what its rows look like


async def test_oversized_row_is_refused(store, term):
    await store.write_graph(RUN, term=term, groups=[a_group()])
    large = a_vertex()
    large.payload.output = b"x" * (9 << 20)
    assert await refusal(outcomes(store, term, large)) == "MESSAGE_TOO_LARGE"


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.7e308])
@pytest.mark.parametrize("name", ["team", "agents", "metrics"])
async def test_reward_must_be_a_number_that_can_be_compared(store, term, name, number):
    await store.write_graph(RUN, term=term, groups=[a_group()])
    value = number if name == "team" else {"x": number}
    sample = a_sample(rewards=graph.RewardSet(**{name: value}))
    assert await refusal(store.write_graph(RUN, term=term, samples=[sample])) == "REWARD_INVALID"


async def test_declared_columns_are_checked_and_count_references(opened):
    store = opened[0]
    columns = [
        graph.Column(name="score", type=graph.COLUMN_TYPE_FLOAT),
        graph.Column(name="image", type=graph.COLUMN_TYPE_OBJECT),
    ]
    await store.create_run(a_run(columns=columns))
    await store.write_graph(RUN, term=0, groups=[a_group()])
    image = await store.put_object(b"pixels")

    def with_column(name: str, value: graph.ColumnValue) -> graph.Vertex:
        vertex = a_vertex()
        vertex.payload.columns[name].CopyFrom(value)
        return vertex

    for name, value in (
        ("unknown", graph.ColumnValue(float_value=1.0)),
        ("score", graph.ColumnValue(string_value="high")),
    ):
        assert await refusal(outcomes(store, 0, with_column(name, value))) == "INVALID_ARGUMENT"
    missing = common.ObjectRef(key="sha256:0")
    wrong = with_column("image", graph.ColumnValue(object_value=missing))
    assert await refusal(outcomes(store, 0, wrong)) == "OBJECT_NOT_FOUND"
    right = with_column("image", graph.ColumnValue(object_value=image))
    assert await outcomes(store, 0, right) == [ACCEPTED]
    assert await outcomes(store, 0, right) == [UNCHANGED]
    record = opened[1].objects.require(image.key)
    assert record.reference_count == 1


async def test_request_id_answers_once(store, term):
    await store.write_graph(RUN, term=term, groups=[a_group()])
    first = await store.write_graph(RUN, term=term, vertices=[a_vertex()], request_id="id-1")
    again = await store.write_graph(RUN, term=term, vertices=[a_vertex()], request_id="id-1")
    assert first == again
    assert list(again.vertex_outcomes) == [ACCEPTED]
    other = store.write_graph(RUN, term=term, vertices=[a_vertex(1)], request_id="id-1")
    assert await refusal(other) == "REQUEST_ID_REUSED"
    await store.acquire_term(RUN, "orchestrator", holder="next")
    # The answer of a call that took effect stays, whoever owns the run now.
    late = await store.write_graph(RUN, term=term, vertices=[a_vertex()], request_id="id-1")
    assert late == first


async def test_unknown_run_is_named(opened):
    write = opened[0].write_graph("nobody", term=0)
    with pytest.raises(FlexMarlError, match="nobody") as caught:
        await write
    assert caught.value.reason.value == "RUN_NOT_FOUND"
