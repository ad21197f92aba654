"""Declared columns: types, readiness, values that come later, and rows that wait for them."""

from __future__ import annotations

import math

import pytest
from meg_store.store_harness import (
    RUN,
    a_group,
    a_record,
    a_run,
    a_vertex,
    closure,
    ref,
)

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.errors import FlexMarlError

COLUMNS = [
    graph.Column(name="score", type=graph.COLUMN_TYPE_FLOAT, required=True),
    graph.Column(name="note", type=graph.COLUMN_TYPE_STRING),
    graph.Column(name="count", type=graph.COLUMN_TYPE_INT),
    graph.Column(name="good", type=graph.COLUMN_TYPE_BOOL),
    graph.Column(name="image", type=graph.COLUMN_TYPE_OBJECT),
]


@pytest.fixture
async def store(opened):
    """A run with declared columns and an open group."""
    await opened[0].create_run(a_run(columns=COLUMNS))
    await opened[0].write_graph(RUN, term=0, groups=[a_group()])
    return opened[0]


def write(vertex: graph.Vertex, **values: graph.ColumnValue) -> pb.ColumnWrite:
    return pb.ColumnWrite(row=ref(vertex), values=values)


async def refusal(awaitable) -> str:
    with pytest.raises(FlexMarlError) as caught:
        await awaitable
    return caught.value.reason.value


async def claimable(store) -> list[str]:
    answer = await store.list_claimable(RUN, "p")
    return [row.row.vertex_id.rpartition("/")[2] for row in answer.rows]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unknown", graph.ColumnValue(int_value=1)),
        ("score", graph.ColumnValue(int_value=1)),
        ("note", graph.ColumnValue(object_value=common.ObjectRef(key="k"))),
        ("count", graph.ColumnValue(float_value=1.0)),
        ("good", graph.ColumnValue(int_value=1)),
        ("image", graph.ColumnValue(string_value="pixels")),
        ("score", graph.ColumnValue()),
    ],
)
async def test_undeclared_and_wrong_types_are_refused(store, name, value):
    vertex = a_vertex()
    await store.write_graph(RUN, term=0, vertices=[vertex])
    late = write(vertex, **{name: value})
    assert await refusal(store.write_columns(RUN, [late], term=0)) == "INVALID_ARGUMENT"
    other = a_vertex(1)
    other.payload.columns[name].CopyFrom(value)
    written = store.write_graph(RUN, term=0, vertices=[other])
    assert await refusal(written) == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "columns",
    [
        [graph.Column(name="logprobs", type=graph.COLUMN_TYPE_FLOAT)],
        [COLUMNS[0], COLUMNS[0]],
        [graph.Column(name="score")],
        [graph.Column(name="a/b", type=graph.COLUMN_TYPE_INT)],
    ],
    ids=["built in", "twice", "no type", "name"],
)
async def test_malformed_declaration_is_refused(opened, columns):
    assert await refusal(opened[0].create_run(a_run(columns=columns))) == "INVALID_ARGUMENT"


async def test_long_string_is_an_object(store):
    vertex = a_vertex()
    vertex.payload.columns["note"].string_value = "x" * 5000
    written = store.write_graph(RUN, term=0, vertices=[vertex])
    assert await refusal(written) == "MESSAGE_TOO_LARGE"


async def test_readiness_says_what_is_there(store):
    vertex = a_vertex(ready_columns=["logprobs"])
    vertex.payload.columns["note"].string_value = "short"
    await store.write_graph(RUN, term=0, vertices=[vertex])
    await store.write_columns(
        RUN, [write(vertex, score=graph.ColumnValue(float_value=2.0))], term=0
    )
    (found,) = await store.get_vertices(RUN, [ref(vertex)])
    assert list(found.meta.ready_columns) == ["logprobs", "note", "score"]
    assert found.payload.columns["score"].float_value == 2.0


@pytest.mark.parametrize("name", ["score", "nonsense"])
async def test_column_cannot_be_ready_without_a_value(store, name):
    vertex = a_vertex(ready_columns=[name])
    written = store.write_graph(RUN, term=0, vertices=[vertex])
    assert await refusal(written) == "INVALID_ARGUMENT"
    vertex.ClearField("payload")
    vertex.meta.num_response_tokens = 0
    del vertex.meta.version_runs[:]
    written = store.write_graph(RUN, term=0, vertices=[vertex])
    assert await refusal(written) == "INVALID_ARGUMENT"


async def test_value_is_final_and_its_repetition_harmless(store):
    vertex = a_vertex()
    await store.write_graph(RUN, term=0, vertices=[vertex])
    nan = graph.ColumnValue(float_value=math.nan)
    for _ in range(2):
        await store.write_columns(RUN, [write(vertex, score=nan)], term=0)
    other = write(vertex, score=graph.ColumnValue(float_value=1.0))
    assert await refusal(store.write_columns(RUN, [other], term=0)) == "CONTENT_MISMATCH"
    # The vertex as its writer knows it is still the same one.
    again = await store.write_graph(RUN, term=0, vertices=[vertex])
    assert list(again.vertex_outcomes) == [pb.WRITE_OUTCOME_UNCHANGED]
    changed = a_vertex()
    changed.payload.columns["note"].string_value = "new"
    late = await store.write_graph(RUN, term=0, vertices=[changed])
    assert list(late.vertex_outcomes) == [pb.WRITE_OUTCOME_DUPLICATE]


async def test_released_row_waits_for_its_required_columns(store):
    first, second = a_vertex(0), a_vertex(1)
    second.payload.columns["score"].float_value = 1.0
    await store.write_graph(RUN, term=0, vertices=[first, second])
    await store.close_groups(RUN, [closure(first, second)], term=0)
    assert await claimable(store) == ["0:1"]
    record = a_record(first)
    assert await refusal(store.create_micro_batch(RUN, record)) == "STATE_TRANSITION_REFUSED"
    value = graph.ColumnValue(float_value=0.5)
    await store.write_columns(RUN, [write(first, score=value)], term=0)
    assert await claimable(store) == ["0:0", "0:1"]
    await store.create_micro_batch(RUN, record)
    await store.mark_rows(RUN, record.micro_batch_id, [ref(first)], term=0)
    assert await claimable(store) == ["0:1"]
    await store.write_columns(RUN, [write(first, score=value)], term=0)
    assert await claimable(store) == ["0:1"]


async def test_late_object_is_counted_once(opened, store):
    vertex = a_vertex()
    await store.write_graph(RUN, term=0, vertices=[vertex])
    missing = write(vertex, image=graph.ColumnValue(object_value=common.ObjectRef(key="none")))
    assert await refusal(store.write_columns(RUN, [missing], term=0)) == "OBJECT_NOT_FOUND"
    image = await store.put_object(b"pixels")
    for _ in range(2):
        value = graph.ColumnValue(object_value=image)
        await store.write_columns(RUN, [write(vertex, image=value)], term=0)
    assert opened[1].objects.require(image.key).reference_count == 1


async def test_columns_of_unknown_rows_and_under_old_terms_are_refused(store):
    value = graph.ColumnValue(float_value=1.0)
    unknown = [write(a_vertex(7), score=value)]
    assert await refusal(store.write_columns(RUN, unknown, term=0)) == "VERTEX_NOT_FOUND"
    await store.write_graph(RUN, term=0, vertices=[a_vertex()])
    await store.acquire_term(RUN, "orchestrator", holder="next")
    stale = store.write_columns(RUN, [write(a_vertex(), score=value)], term=0)
    assert await refusal(stale) == "TERM_STALE"
