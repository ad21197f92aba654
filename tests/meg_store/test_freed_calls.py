"""What a call brought is freed with it, not at some collection of the interpreter much later."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

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

from flexmarl.meg_store.database import Draft


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def drafts() -> int:
    return sum(isinstance(found, Draft) for found in gc.get_objects())


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
    async with asyncio.timeout(10):
        while drafts():  # noqa: ASYNC110 - the last handler returns
            await asyncio.sleep(0.01)
