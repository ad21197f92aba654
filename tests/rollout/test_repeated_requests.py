"""Requests that come more than once, at one dispatcher and at the one after it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from rollout.dispatcher_harness import Cluster
from rollout.team_kit import opened

from flexmarl.api.common.v1 import common_pb2
from flexmarl.client.errors import FlexMarlError
from flexmarl.core.errors import ErrorReason

DONE, CANCELLED = common_pb2.SAMPLE_STATUS_DONE, common_pb2.SAMPLE_STATUS_CANCELLED

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def open_again(cluster: Cluster) -> None:
    """Under the term that it has: what a client does that was not answered."""
    await cluster.rollout.open_run(cluster.run_id, term=cluster.term, shards=cluster.shards)


async def repeat(cluster: Cluster) -> None:
    """All that starts a run's samples, three times each, and the three at once."""
    for request in (
        lambda: open_again(cluster),
        lambda: cluster.activate(0),
        lambda: cluster.start(cluster.specs),
    ):
        await asyncio.gather(*(request() for _ in range(3)))


async def ended(cluster: Cluster) -> dict[str, int]:
    return {name: sample.status for name, sample in (await cluster.samples()).items()}


async def test_nothing_is_begun_or_cut_twice(make: Callable[..., Cluster], tmp_path):
    async with make() as cluster:
        await opened(cluster, tmp_path)
        host = cluster.hosts[0]
        host.answer = lambda request: [1, 2] if request.policy == "p" else None
        ids = await cluster.admit(0, groups=3, samples=2, start=False)
        kept, cut = ids[:4], ids[4:]
        await repeat(cluster)
        await cluster.until(lambda s: s.queues["q"].num_running == 2 * len(ids))

        async def cut_thrice() -> None:
            cuts = (
                cluster.rollout.cancel_samples(cluster.run_id, cut, term=cluster.term)
                for _ in range(3)
            )
            await asyncio.gather(*cuts)

        await asyncio.gather(repeat(cluster), cut_thrice())
        cluster.rollout_service.kill()
        await cluster.rollout_service.start()
        await asyncio.gather(repeat(cluster), cut_thrice())
        await cluster.until(lambda s: s.counters["reattached"] == 2 * len(kept))
        host.answer = lambda _: [1, 2]
        for request in host.unanswered():
            host.finish(request, [1, 2])
        await cluster.until_ended()
        ends = dict.fromkeys(kept, DONE) | dict.fromkeys(cut, CANCELLED)
        assert await ended(cluster) == ends
        made = len(host.requests)
        for _ in range(2):
            await cluster.rollout.close_run(cluster.run_id, term=cluster.term)
            await repeat(cluster)
            await cluster.until_ended()
        assert await ended(cluster) == ends
        assert len(host.requests) == made
        assert set(Counter(r.attempt_id for r in host.requests).values()) == {1}


async def test_a_run_beside_an_open_one_is_refused_by_name_and_disturbs_nothing(make, tmp_path):
    async with make() as cluster, make() as other:
        await opened(cluster, tmp_path)
        await other.create_run(tmp_path / "other.jsonl")
        host = cluster.hosts[0]
        host.answer = lambda _: None
        ids = await cluster.admit(0, groups=2)
        await cluster.until(lambda s: s.queues["p"].num_running == 2)
        with pytest.raises(FlexMarlError, match=f"{cluster.run_id}.*stop that run first") as caught:
            await other.open()
        assert caught.value.reason is ErrorReason.NOT_BUILT
        host.answer = lambda _: [1, 2]
        for request in list(host.in_hand.values()):
            host.finish(request, [1, 2])
        await cluster.until_ended()
        assert await ended(cluster) == dict.fromkeys(ids, DONE)
