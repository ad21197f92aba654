"""What is told of a store that takes no rows."""

from __future__ import annotations

import asyncio

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.api.meg_store.v1.graph_pb2 import Sample
from flexmarl.client.errors import make_error
from flexmarl.core.errors import ErrorReason
from flexmarl.rollout.dispatcher.writer import GraphWriter


class HangingStore:
    """Answers nothing until it is let go, as a process that is stopped does."""

    def __init__(self) -> None:
        self.asked, self.let_go = asyncio.Event(), asyncio.Event()
        self.failures = 0

    async def write_graph(self, run_id, *, samples, **_):
        self.asked.set()
        await self.let_go.wait()
        if self.failures:
            self.failures -= 1
            raise make_error(ErrorReason.UNAVAILABLE, "gone")
        return pb.WriteGraphResponse(sample_outcomes=[pb.WRITE_OUTCOME_ACCEPTED] * len(samples))


async def test_a_store_that_hangs_is_waited_for_from_the_first_moment():
    store = HangingStore()
    store.failures = 2
    writer = GraphWriter(
        store, run_id="r", term=lambda: 1, on_trouble=lambda error: None, patience_s=60.0
    )
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(writer.run())
    stored: asyncio.Queue[int] = asyncio.Queue()
    try:
        assert writer.waiting_s(loop.time()) == 0.0
        writer.sample(Sample(sample_id="s"), [], stored.put_nowait)
        await store.asked.wait()
        begun = loop.time()
        assert writer.waiting_s(begun + 5.0) >= 5.0  # no answer and no error: it is told
        store.let_go.set()
        assert await stored.get() == pb.WRITE_OUTCOME_ACCEPTED
        assert writer.waiting_s(loop.time()) == 0.0
    finally:
        task.cancel()
