"""What a call brought is freed with it, not at some collection of the interpreter much later."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from meg_store.store_harness import (
    RUN,
    a_group,
    a_record,
    a_run,
    a_sample,
    a_vertex,
    closure,
    ref,
)

from flexmarl.api.meg_store.v1.graph_pb2 import Vertex
from flexmarl.core.errors import DomainError
from flexmarl.meg_store.database import Draft
from flexmarl.meg_store.servicer import Call


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def freed() -> None:
    """Waits until nothing of a call is left: the last handler may not have returned yet."""
    async with asyncio.timeout(10):
        while any(isinstance(found, (Draft, Call)) for found in gc.get_objects()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_no_call_leaves_its_draft_to_the_collector(opened, uncollected):
    store, _ = opened
    await store.create_run(a_run())
    term = await store.acquire_term(RUN, "orchestrator", holder="test")
    rows = [a_vertex(number, tokens=1000) for number in range(20)]  # a large call
    await store.write_graph(RUN, term=term, groups=[a_group()], vertices=rows)
    await store.write_graph(RUN, term=term, vertices=[*rows, a_vertex(20)])
    late = a_vertex(0, tokens=3)
    await store.write_graph(RUN, term=term, vertices=[late], samples=[a_sample()])
    await store.close_groups(RUN, [closure(*rows)], term=term)
    await store.create_micro_batch(RUN, a_record(rows[0], term=term))
    await store.mark_rows(RUN, "b000000a0-m0000-p", [ref(rows[0])], term=term)
    await freed()


REFUSED: dict[str, Callable[[list[Vertex]], dict[str, Any]]] = {
    "decided": lambda rows: {"vertices": rows, "term": 99},
    "malformed": lambda rows: {"vertices": [*rows, Vertex()]},
    "too large": lambda rows: {"vertices": [*rows, a_vertex(20, tokens=3_000_000)]},
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("tokens", [1, 1000], ids=["small", "large"])
async def test_no_refused_call_is_left_to_the_collector(opened, uncollected, why, tokens):
    """gRPC keeps the exception that ends a call, and a traceback all that it passed."""
    store, _ = opened
    await store.create_run(a_run())
    term = await store.acquire_term(RUN, "orchestrator", holder="test")
    await store.write_graph(RUN, term=term, groups=[a_group()])
    rows = [a_vertex(number, tokens=tokens) for number in range(20)]
    with pytest.raises(DomainError):
        await store.write_graph(RUN, **{"term": term, **REFUSED[why](rows)})
    await freed()
