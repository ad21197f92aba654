"""Neighbours, critical path and degrees of a sample's graph."""

from __future__ import annotations

import random

import pytest

from flexmarl.core.graph_shape import Call, GraphShape, Step, critical_path, neighbourhood

# splitter a -> sorters b, c -> merger d; e stands alone.
EDGES = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c", "c"], "e": []}


def call(
    agent: str,
    ready: int,
    dispatched: int,
    finished: int,
    upstream=(),
    *,
    is_done: bool = True,
    tokens: int = 1,
) -> Call:
    return Call(
        agent=agent,
        policy=agent,
        upstream=upstream,
        ready_ns=ready,
        dispatched_ns=dispatched,
        finished_ns=finished,
        is_done=is_done,
        num_response_tokens=tokens,
    )


CALLS = {
    "a": call("splitter", 12, 13, 20),
    "b": call("sorter", 21, 22, 30, ["a"]),
    "c": call("sorter", 21, 40, 60, ["a"]),
    "d": call("merger", 61, 61, 70, ["b", "c", "c"]),
    "e": call("judge", 12, 0, 90, is_done=False),
}


@pytest.mark.parametrize(
    ("start", "hops", "up", "down", "found"),
    [
        ("b", 1, True, True, "abd"),
        ("b", 1, True, False, "ab"),
        ("b", 1, False, True, "bd"),
        ("d", 1, True, True, "bcd"),
        ("d", 9, True, True, "abcd"),
        ("a", 2, False, True, "abcd"),
        ("e", 5, True, True, "e"),
        ("b", 0, True, True, "b"),
    ],
)
def test_neighbours(start, hops, up, down, found):
    near = neighbourhood(EDGES, start, hops=hops, upstream=up, downstream=down)
    assert near == set(found)


def test_critical_path_waits_for_the_slower_sorter():
    assert critical_path(CALLS, started_ns=10) == [
        Step("a", 2, 1, 7),
        Step("c", 1, 19, 20),
        Step("d", 1, 0, 9),
    ]
    assert critical_path(CALLS, started_ns=0)[0].before_ns == 0


def test_parts_of_a_critical_path_add_up_to_its_length():
    rng = random.Random(4)
    for _ in range(50):
        calls: dict[str, Call] = {}
        for number in range(8):
            upstream = rng.sample(sorted(calls), k=rng.randint(0, min(2, len(calls))))
            ready = max([calls[u].finished_ns for u in upstream], default=5) + rng.randint(0, 3)
            sent = ready + rng.randint(0, 9)
            calls[str(number)] = call("x", ready, sent, sent + rng.randint(1, 9), upstream)
        steps = critical_path(calls, started_ns=5)
        length = sum(step.before_ns + step.queued_ns + step.running_ns for step in steps)
        assert 5 + length == max(c.finished_ns for c in calls.values())


def test_sample_in_which_nothing_succeeded_ends_with_its_last_call():
    steps = critical_path({"e": CALLS["e"]}, started_ns=2)
    assert steps == [Step("e", 10, 78, 0)]
    assert critical_path({}, started_ns=2) == []


def test_degrees_per_agent():
    shape = GraphShape()
    shape.add(CALLS)
    shape.add({"a": CALLS["a"]})
    assert shape.num_samples == 2
    sorter, merger, splitter = (shape.agents[n] for n in ("sorter", "merger", "splitter"))
    assert (sorter.num_vertices, sorter.num_samples, sorter.max_per_sample) == (2, 1, 2)
    assert (sorter.in_degree, sorter.out_degree, sorter.max_out_degree) == (2, 2, 1)
    assert (merger.in_degree, merger.max_in_degree, merger.out_degree) == (2, 2, 0)
    assert (splitter.out_degree, splitter.max_out_degree, splitter.num_samples) == (2, 2, 2)
    assert (splitter.num_critical, sorter.num_critical, shape.agents["judge"].num_critical) == (
        2,
        1,
        0,
    )
    assert (sorter.queued_ns, sorter.running_ns) == (20, 28)
    edges_in = sum(agent.in_degree for agent in shape.agents.values())
    assert edges_in == sum(agent.out_degree for agent in shape.agents.values())
