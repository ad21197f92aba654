"""Listings by any meta column, sorted and paged; what follows edges; statistics per agent."""

from __future__ import annotations

import pytest
from meg_store.store_harness import RUN, SAMPLE, a_group, a_sample, a_vertex, closure

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.errors import FlexMarlError
from flexmarl.meg_store import queries, training, vertex_listing

TOOL = {"kind": common.VERTEX_KIND_TOOL, "agent": "python", "policy": "", "trainable": False}


def rows():
    """Two groups: solver -> python -> solver, and beside them one cut judge."""
    return [
        a_vertex(0, ready_unix_ns=10, dispatched_unix_ns=12, finished_unix_ns=20),
        a_vertex(
            1,
            ready_unix_ns=21,
            dispatched_unix_ns=21,
            finished_unix_ns=60,
            upstream_vertex_ids=[f"{SAMPLE}/0:0"],
            **TOOL,
        ),
        a_vertex(
            2,
            tokens=5,
            policy_version=1,
            ready_unix_ns=62,
            dispatched_unix_ns=70,
            finished_unix_ns=90,
            upstream_vertex_ids=[f"{SAMPLE}/0:1"],
            version_runs=[],
        ),
        a_vertex(
            3,
            agent="judge",
            policy="q",
            status=common.VERTEX_STATUS_CANCELLED,
            ready_unix_ns=10,
            finished_unix_ns=95,
        ),
        a_vertex(0, group=1, policy_version=2, ready_unix_ns=5, finished_unix_ns=200),
    ]


@pytest.fixture
async def filled(store, term):
    written = rows()
    await store.write_graph(
        RUN,
        term=term,
        groups=[a_group(0), a_group(1)],
        vertices=written,
        samples=[a_sample(started_unix_ns=4), a_sample(group=1)],
    )
    closed = closure(written[0], written[2])
    closed.released[1].reward = -2.5
    await store.close_groups(RUN, [closed, closure(written[4], group=1)], term=term)
    return store


async def paths(store, *, page_size=0, **options) -> list[str]:
    listing = {key: options.pop(key) for key in ("order", "descending") if key in options}
    chosen = pb.VertexFilter(**options)
    found = store.list_vertices(RUN, chosen, page_size=page_size, **listing)
    return [f"{v.meta.group_id[-1]}{v.meta.path}" async for v in found]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, ["00:3", "00:1", "00:0", "00:2", "10:0"]),
        ({"agent": "solver"}, ["00:0", "00:2", "10:0"]),
        ({"agent": "nobody"}, []),
        ({"policy": "q"}, ["00:3"]),
        ({"kind": common.VERTEX_KIND_TOOL}, ["00:1"]),
        ({"status": common.VERTEX_STATUS_CANCELLED}, ["00:3"]),
        ({"batch": 1}, []),
        ({"sample_id": SAMPLE, "agent": "solver"}, ["00:0", "00:2"]),
        ({"sample_id": SAMPLE, "batch": 1}, []),
        ({"sample_id": SAMPLE, "group_id": "b000000a0-g0001"}, []),
        ({"id_prefix": "b000000a0-g0001"}, ["10:0"]),
        ({"id_prefix": f"{SAMPLE}/0:2", "batch": 0}, ["00:2"]),
        ({"id_prefix": "b000000a0-g0001", "sample_id": SAMPLE}, []),
        ({"min_version": 1}, ["00:2", "10:0"]),
        ({"min_version": 1, "max_version": 1}, ["00:2"]),
        ({"min_reward": 0.0}, ["00:0", "10:0"]),
        ({"max_reward": 0.0}, ["00:2"]),
        ({"min_reward": -3.0, "max_reward": -2.5}, ["00:2"]),
        ({"finished_from_unix_ns": 90, "finished_before_unix_ns": 200}, ["00:3", "00:2"]),
        ({"claimable": True, "max_version": 1}, ["00:0", "00:2"]),
        ({"micro_batch_id": "b000000a0-m0000-p"}, []),
    ],
)
async def test_filters(filled, chosen, expected):
    assert await paths(filled, **chosen) == expected
    assert await paths(filled, page_size=1, **chosen) == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (pb.VERTEX_ORDER_ID, ["00:3", "00:1", "00:0", "00:2", "10:0"]),
        (pb.VERTEX_ORDER_FINISHED, ["00:0", "00:1", "00:2", "00:3", "10:0"]),
        (pb.VERTEX_ORDER_DURATION, ["00:0", "00:2", "00:1", "00:3", "10:0"]),
        (pb.VERTEX_ORDER_REWARD, ["00:3", "00:1", "00:2", "00:0", "10:0"]),
        (pb.VERTEX_ORDER_TOKENS, ["00:3", "00:1", "00:0", "10:0", "00:2"]),
    ],
)
async def test_orders(filled, order, expected):
    for page_size in (0, 1, 2):
        found = await paths(filled, order=order, page_size=page_size)
        assert found == expected
        found = await paths(filled, order=order, descending=True, page_size=page_size)
        assert found == expected[::-1]


async def test_token_is_bound_to_the_order(filled):
    request = pb.ListVerticesRequest(run_id=RUN, page_size=1, order=pb.VERTEX_ORDER_REWARD)
    page = await filled._call("ListVertices", request)
    other = pb.ListVerticesRequest(run_id=RUN, page_size=1, page_token=page.next_page_token)
    with pytest.raises(FlexMarlError, match="page_token"):
        await filled._call("ListVertices", other)


async def test_large_pages_of_a_sorted_listing_keep_the_best(store, term):
    vertices = [a_vertex(n, finished_unix_ns=(n * 37) % 101 + 1) for n in range(100)]
    await store.write_graph(RUN, term=term, groups=[a_group()], vertices=vertices)
    listing = store.list_vertices(RUN, order=pb.VERTEX_ORDER_FINISHED, page_size=7)
    times = [v.meta.finished_unix_ns async for v in listing]
    assert times == sorted(v.meta.finished_unix_ns for v in vertices)


async def test_critical_path_by_time(filled):
    answer = await filled.get_sample_graph(RUN, SAMPLE, critical_path=True)
    steps = [
        (s.vertex_id.partition("/")[2], s.before_ns, s.queued_ns, s.running_ns)
        for s in answer.critical_path
    ]
    assert steps == [("0:0", 6, 2, 8), ("0:1", 1, 0, 39), ("0:2", 2, 8, 20)]
    assert not (await filled.get_sample_graph(RUN, SAMPLE)).critical_path


@pytest.mark.parametrize(
    ("call", "options", "near"),
    [
        (1, {}, ["0:0", "0:1", "0:2"]),
        (1, {"direction": pb.EDGE_DIRECTION_UPSTREAM}, ["0:0", "0:1"]),
        (1, {"direction": pb.EDGE_DIRECTION_DOWNSTREAM}, ["0:1", "0:2"]),
        (2, {}, ["0:1", "0:2"]),
        (2, {"hops": 2}, ["0:0", "0:1", "0:2"]),
        (3, {"hops": 9}, ["0:3"]),
    ],
)
async def test_neighbourhood(filled, call, options, near):
    found = await filled.get_neighbourhood(RUN, f"{SAMPLE}/0:{call}", **options)
    assert [v.meta.path for v in found] == near


async def test_neighbourhood_of_nothing_is_refused(filled):
    with pytest.raises(FlexMarlError) as caught:
        await filled.get_neighbourhood(RUN, f"{SAMPLE}/0:9")
    assert caught.value.reason.value == "VERTEX_NOT_FOUND"


async def test_statistics_per_agent(filled):
    answer = await filled.describe_agents(RUN)
    assert answer.num_samples == 2
    by_name = {agent.agent: agent for agent in answer.agents}
    assert sorted(by_name) == ["judge", "python", "solver"]
    solver = by_name["solver"]
    assert (solver.num_vertices, solver.num_samples, solver.max_per_sample) == (3, 2, 2)
    assert (solver.in_degree, solver.out_degree, solver.num_critical) == (1, 1, 3)
    assert (by_name["python"].in_degree, by_name["python"].running_ns) == (1, 39)
    assert by_name["judge"].num_critical == 0
    assert not (await filled.describe_agents(RUN, batch=7)).agents


async def test_a_page_ends_before_it_outgrows_a_message(store, monkeypatch):
    for room in (queries, training, vertex_listing):
        monkeypatch.setattr(room, "PAGE_BYTES", 1000)
    groups = [a_group(n, query_json=b"x" * 300) for n in range(10)]
    samples = [a_sample(group=n, output_json=b"x" * 300) for n in range(10)]
    rows = [a_vertex(group=n) for n in range(10)]
    await store.write_graph(RUN, term=0, groups=groups, vertices=rows, samples=samples)
    for version in range(10):
        manifest = graph.Manifest(version=version)
        manifest.policies["p"].weights_hash = "x" * 300
        await store.commit(RUN, manifest, expected_version=version - 1 if version else None)
    for method, request, field, listed in (
        ("ListGroups", pb.ListGroupsRequest(run_id=RUN), "groups", store.list_groups(RUN)),
        ("ListSamples", pb.ListSamplesRequest(run_id=RUN), "samples", store.list_samples(RUN)),
        (
            "ListVertices",
            pb.ListVerticesRequest(run_id=RUN, view=pb.VERTEX_VIEW_FULL),
            "vertices",
            collect(store.list_vertices(RUN, view=pb.VERTEX_VIEW_FULL)),
        ),
        (
            "ListManifests",
            pb.ListManifestsRequest(run_id=RUN),
            "manifests",
            store.list_manifests(RUN),
        ),
    ):
        page = getattr(await store._call(method, request), field)
        assert 0 < len(page) < 10, method
        assert len(await listed) == 10, method


async def collect(rows) -> list:
    return [row async for row in rows]
