"""Claimable rows: oldest group first, bounded by rows or tokens, true after marks and releases."""

from __future__ import annotations

import random

import pytest
from meg_store.store_harness import RUN, a_group, a_record, a_vertex, closure, ref

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.meg_store import claims as claims_module


async def listed(store, policy="p", **bounds) -> tuple[list[str], bool]:
    answer = await store.list_claimable(RUN, policy, **bounds)
    return [row.row.vertex_id for row in answer.rows], answer.more


async def release(store, term, *vertices, group=0):
    await store.write_graph(RUN, term=term, groups=[a_group(group)], vertices=vertices)
    await store.close_groups(RUN, [closure(*vertices, group=group)], term=term)


async def test_oldest_group_first_over_all_agents_of_the_policy(store, term):
    late = [a_vertex(0, group=1, agent="aaa"), a_vertex(1, group=1)]
    early = [a_vertex(0), a_vertex(1, agent="zzz"), a_vertex(2, policy="q")]
    await release(store, term, *late, group=1)
    await release(store, term, *early)
    assert await listed(store) == (
        [v.meta.vertex_id for v in (early[0], early[1], late[0], late[1])],
        False,
    )
    assert await listed(store, "q") == ([early[2].meta.vertex_id], False)
    assert await listed(store, "nobody") == ([], False)


async def test_bounds_of_rows_and_tokens(store, term):
    vertices = [a_vertex(n, tokens=n + 1, num_prompt_tokens=1) for n in range(4)]  # 2 3 4 5 tokens
    await release(store, term, *vertices)
    ids = [v.meta.vertex_id for v in vertices]
    assert await listed(store, max_rows=2) == (ids[:2], True)
    assert await listed(store, max_rows=4) == (ids, False)
    assert await listed(store, max_tokens=9) == (ids[:3], True)
    assert await listed(store, max_tokens=1) == (ids[:1], True)
    answer = await store.list_claimable(RUN, "p")
    assert [row.num_tokens for row in answer.rows] == [2, 3, 4, 5]


async def test_listing_follows_marks_releases_and_voids(store, term, monkeypatch):
    """Against a plain set, with a window so small that rows come and go on both of its ends."""
    monkeypatch.setattr(claims_module, "_MIN_FILL", 3)
    monkeypatch.setattr(claims_module, "_MAX_WINDOW", 6)
    rng = random.Random(11)
    groups = {g: [a_vertex(n, group=g) for n in range(4)] for g in range(30)}
    waiting = sorted(groups)
    rng.shuffle(waiting)
    expected: dict[str, object] = {}
    ordinal = 0
    for _ in range(120):
        step = rng.random()
        if step < 0.3 and waiting:
            group = waiting.pop()
            await release(store, term, *groups[group], group=group)
            expected.update({v.meta.vertex_id: v for v in groups[group]})
        elif step < 0.5 and expected:
            taken = rng.sample(sorted(expected), k=min(len(expected), rng.randint(1, 3)))
            record = a_record(*(expected.pop(v) for v in taken), ordinal=ordinal, term=term)
            ordinal += 1
            await store.create_micro_batch(RUN, record)
            await store.mark_rows(RUN, record.micro_batch_id, record.rows, term=term)
        elif step < 0.6 and expected:
            name = rng.choice(sorted(expected))
            voided = pb.VoidedRow(row=ref(expected.pop(name)), reason=common.VOID_REASON_OVERLONG)
            await store.void_rows(RUN, [voided], term=term)
        limit = rng.randint(1, 9)
        found, more = await listed(store, max_rows=limit)
        assert found == sorted(expected)[:limit]
        assert more == (len(expected) > limit)


async def test_listing_is_right_after_a_restart(process):
    from meg_store.store_harness import a_run

    from flexmarl.client.store import StoreClient

    async with StoreClient.connect(await process.start(), patience_s=30) as store:
        await store.create_run(a_run())
        vertices = [a_vertex(n) for n in range(5)]
        await release(store, 0, *vertices)
        record = a_record(vertices[1], vertices[0])
        await store.create_micro_batch(RUN, record)
        await store.mark_rows(RUN, record.micro_batch_id, record.rows, term=0)
        before = await listed(store)
        process.kill()
        await process.start()
        assert await listed(store) == before
        assert len(before[0]) == 3


@pytest.mark.parametrize("policy", ["", "a/b"])
async def test_policy_must_be_named(store, policy):
    from flexmarl.client.errors import FlexMarlError

    with pytest.raises(FlexMarlError, match="policy"):
        await store.list_claimable(RUN, policy)


async def test_names_that_no_policy_has_are_not_kept(opened, store):
    for number in range(20):
        assert not (await store.list_claimable(RUN, f"nobody{number}")).rows
    assert not opened[1].claims._windows
