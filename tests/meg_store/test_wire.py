"""Responses made of stored bytes are the contract's messages."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from meg_store.store_harness import a_vertex

from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.meg_store import wire


@pytest.mark.parametrize(
    ("message", "name", "number"),
    [
        (graph.Vertex, "meta", 1),
        (graph.Vertex, "payload", 2),
        (pb.GetVerticesResponse, "vertices", 1),
        (pb.ListVerticesResponse, "vertices", 1),
        (pb.ListVerticesResponse, "next_page_token", 2),
        (pb.WatchResponse, "events", 1),
        (pb.WatchResponse, "cursor", 2),
    ],
)
def test_field_numbers_are_the_contracts(message: type[Message], name, number):
    assert message.DESCRIPTOR.fields_by_name[name].number == number


def test_rows_are_concatenated():
    vertices = [a_vertex(call, tokens=tokens) for call, tokens in enumerate((0, 1, 200, 20_000))]
    data = wire.vertices_response(
        (v.meta.SerializeToString(), v.payload.SerializeToString()) for v in vertices
    )
    assert list(pb.GetVerticesResponse.FromString(data).vertices) == vertices
    first = vertices[0]
    one = wire.vertex(first.meta.SerializeToString(), first.payload.SerializeToString())
    assert graph.Vertex.FromString(one) == first


def test_rows_without_payload_have_none():
    vertices = [a_vertex(call) for call in range(3)]
    data = wire.vertices_response((v.meta.SerializeToString(), None) for v in vertices)
    read = pb.GetVerticesResponse.FromString(data).vertices
    assert [v.meta for v in read] == [v.meta for v in vertices]
    assert not any(v.HasField("payload") for v in read)


@pytest.mark.parametrize("cursor", [0, 1, 127, 128, 1 << 40])
def test_watch_response(cursor):
    events = [pb.Event(cursor=n, kind=pb.EVENT_KIND_COMMIT) for n in (1, 2)]
    data = wire.watch_response((e.SerializeToString() for e in events), cursor)
    assert pb.WatchResponse.FromString(data) == pb.WatchResponse(events=events, cursor=cursor)
