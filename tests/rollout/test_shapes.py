"""Every shape of workflow through real worker, dispatcher, store: ids, edges, order, replay."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import pytest_asyncio
from rollout.dispatcher_harness import Cluster, Services, user_code_of
from rollout.shapes import EXPECTED, LONGEST, ROLES, longest, parse, respond
from rollout.worker_harness import run_config, text_of, tokens_of, write_model

from flexmarl.api.common.v1 import common_pb2

DONE = common_pb2.VERTEX_STATUS_DONE
NAMES = sorted(EXPECTED)
NUM_FIRST = sum("<-" not in line for lines in EXPECTED.values() for line in lines)
"""Calls that need no other."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Script:
    """Answers as `respond` says; races are decided here.

    Attributes:
        limit: Requests that are answered at all.
    """

    def __init__(self) -> None:
        self.limit = 1 << 30
        self.num_answered = 0
        self.host = None
        self.held: dict[str, list] = {}

    def __call__(self, request):
        role, _, text = text_of(request.prompt_tokens).removesuffix(">").partition(" ")
        if self.num_answered >= self.limit or text in ("lane 0", "lane 2"):
            return None
        if text.startswith("each"):
            return self._race(request)
        self.num_answered += 1
        return tokens_of(respond(role, text))

    def _race(self, request):
        """The three of a sample end in the order 2, 0, 1."""
        racers = self.held.setdefault(request.attempt_id.partition("/")[0], [])
        racers.append(request)
        if len(racers) == 3:
            racers.sort(key=lambda r: r.attempt_id)
            for n in (2, 0, 1):
                self.host.finish(racers[n], tokens_of("racer"))
            racers.clear()

    def go_on(self):
        """Answers what was left unanswered."""
        for request in self.host.unanswered():
            tokens = self(request)
            if tokens is not None:
                self.host.finish(request, tokens)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "package").mkdir()
    source = Path(__file__).with_name("shapes_workflow.py")
    shutil.copy(source, folder / "package/team.py")
    agents = {
        role: {"policy": "pq"[n % 2], "prompt": role + " {text}>", "max_tokens": 32}
        for n, role in enumerate(ROLES)
    }
    config = run_config(
        write_model(folder / "model", max_context=512), folder / "package", agents=agents
    )
    services = Services(folder)
    try:
        await services.revive()
        async with Cluster(services, config) as cluster:
            await cluster.create_run(folder / "data.jsonl")
            script = Script()
            script.host = cluster.host(answer=script)
            cluster.script = script
            await cluster.open()
            await cluster.activate(0)
            yield cluster
    finally:
        services.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def graphs(cluster):
    """One sample of each shape, undisturbed."""
    ids = await cluster.admit(0, queries=[{"shape": name} for name in NAMES])
    await cluster.until_ended()
    return {name: await cluster.graph(i) for name, i in zip(NAMES, ids, strict=True)}


def finished(graph):
    return {v.meta.path: v.meta for v in graph.vertices if v.meta.status == DONE}


def edges_of(metas):
    return {
        path: (meta.agent, [u.partition("/")[2] for u in meta.upstream_vertex_ids])
        for path, meta in metas.items()
    }


@pytest.mark.parametrize("name", NAMES)
async def test_calls_have_the_expected_paths_and_edges(graphs, name):
    graph = graphs[name]
    assert graph.sample.status == common_pb2.SAMPLE_STATUS_DONE, graph.sample.failure
    edges = edges_of(finished(graph))
    assert edges == parse(EXPECTED[name])
    assert longest(edges) == LONGEST[name]


@pytest.mark.parametrize("name", NAMES)
async def test_nothing_starts_before_what_it_needs_has_delivered(graphs, name):
    # I1, by the dispatcher's clock: a call is ready after its last dependency finished.
    metas = finished(graphs[name])
    for meta in metas.values():
        for upstream in meta.upstream_vertex_ids:
            assert metas[upstream.partition("/")[2]].finished_unix_ns <= meta.ready_unix_ns
        assert meta.ready_unix_ns <= meta.dispatched_unix_ns <= meta.finished_unix_ns


async def test_two_loops_through_one_node_run_in_order_and_reach_the_exit(graphs):
    # Case A1: loop-back edges do not block the first entry.
    order = json.loads(graphs["two_loops_through_one_node"].sample.output_json)
    assert order == ["a", "b", "c", "o", "x", "o", "y", "o", "e"]


async def test_the_rest_of_a_first_join_is_cancelled_and_told(graphs):
    graph = graphs["first_of_three"]
    others = {v.meta.path: v.meta.status for v in graph.vertices if v.meta.status != DONE}
    cancelled = common_pb2.VERTEX_STATUS_CANCELLED
    assert others == {"0:0": cancelled, "0:2": cancelled}


async def test_an_each_join_passes_on_whoever_comes(graphs):
    graph = graphs["as_ready"]
    assert json.loads(graph.sample.output_json) == ["0:2", "0:0", "0:1"]


async def test_every_shape_survives_the_death_of_its_worker_with_the_same_graph(cluster, graphs):
    script = cluster.script
    stored = (await cluster.status()).counters["vertices"]
    script.num_answered, script.limit = 0, 0
    ids = await cluster.admit(1, queries=[{"shape": name} for name in NAMES])
    await cluster.activate(1)
    # All first calls wait for each other: hardly a sample has ended when its worker dies.
    num_asked = NUM_FIRST + 2  # lanes that lose
    await cluster.until(
        lambda _: sum(r.attempt_id.startswith("b000001") for r in script.host.requests) == num_asked
    )
    script.limit = NUM_FIRST
    script.go_on()
    await cluster.until(lambda _: script.num_answered == script.limit)
    num_stored = script.limit + 3  # those that race are not counted
    await cluster.until(lambda s: s.counters["vertices"] >= stored + num_stored)
    for kind in ("worker", "reward"):
        os.kill(await user_code_of(cluster, kind), signal.SIGKILL)
    await cluster.until(lambda s: s.counters["worker_deaths"] == 1)
    script.held.clear()
    script.limit = 1 << 30
    script.go_on()  # its calls in progress are not sent again: they end where they are
    status = await cluster.until_ended()
    assert status.counters["replayed"] >= 20
    assert status.counters["samples_superseded"] == 0
    for name, sample_id in zip(NAMES, ids, strict=True):
        graph = await cluster.graph(sample_id)
        again, before = finished(graph), finished(graphs[name])
        assert edges_of(again) == edges_of(before), name
        hashes = {path: meta.input_hash for path, meta in before.items()}
        assert {path: meta.input_hash for path, meta in again.items()} == hashes, name
