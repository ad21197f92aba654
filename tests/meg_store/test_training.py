"""Release, void, micro-batches, marks, state records, commits, retention, accounts."""

from __future__ import annotations

import asyncio

import pytest
from meg_store.store_harness import (
    GROUP,
    RUN,
    a_group,
    a_record,
    a_run,
    a_sample,
    a_vertex,
    closure,
    ref,
    serving,
)

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.errors import FlexMarlError


async def refusal(awaitable) -> str:
    with pytest.raises(FlexMarlError) as caught:
        await awaitable
    return caught.value.reason.value


async def write_rows(store, term, *vertices):
    await store.write_graph(RUN, term=term, groups=[a_group()], vertices=vertices)


async def claimable(store):
    chosen = pb.VertexFilter(claimable=True)
    return [v.meta.path async for v in store.list_vertices(RUN, chosen)]


async def segment(store, name: str, *, size: int = 64) -> common.ObjectRef:
    async with store.allocate_segment(RUN, name, [BufferSpec("w", "U8", (size,))]) as writer:
        writer.buffers["w"].data[:] = bytes([len(name) % 251]) * size
    return writer.object


async def sealed(store, name: str) -> bool:
    try:
        async with store.open_segment(RUN, name, holder="test"):
            return True
    except FlexMarlError:
        return False


class TestClosure:
    async def test_rows_are_released_and_void_in_one_write(self, store, term):
        rows = [a_vertex(call) for call in range(3)]
        await write_rows(store, term, *rows)
        await store.close_groups(RUN, [closure(rows[0], voided=(rows[1],))], term=term)
        assert await claimable(store) == ["0:0"]
        metas = [v.meta for v in await store.get_vertices(RUN, [ref(row) for row in rows])]
        assert (metas[0].reward, metas[0].advantage) == (1.0, 0.5)
        assert metas[1].void_reason == common.VOID_REASON_NO_REWARD
        assert not metas[2].HasField("advantage")
        group = (await store.list_groups(RUN))[0]
        assert group.status == common.GROUP_STATUS_CLOSED
        assert group.closed_unix_ns > 0

    async def test_same_end_again_changes_nothing_another_is_refused(self, store, term):
        rows = [a_vertex(0), a_vertex(1)]
        await write_rows(store, term, *rows)
        await store.close_groups(RUN, [closure(rows[0])], term=term)
        await store.close_groups(RUN, [closure(rows[0])], term=term)
        for other in (
            closure(rows[1]),
            closure(rows[0], voided=(rows[1],)),
            pb.GroupClosure(
                group_id=GROUP,
                status=common.GROUP_STATUS_DROPPED,
                drop_reason=common.VOID_REASON_GROUP_DROPPED,
            ),
        ):
            refused = await refusal(store.close_groups(RUN, [other], term=term))
            assert refused == "STATE_TRANSITION_REFUSED"

    async def test_wrong_closures_are_refused_whole(self, store, term):
        await write_rows(store, term, a_vertex(0), a_vertex(1, trainable=False, policy="frozen"))
        nan = closure(a_vertex(0))
        nan.released[0].advantage = float("nan")
        assert await refusal(store.close_groups(RUN, [nan], term=term)) == "REWARD_INVALID"
        untrained = closure(a_vertex(0), a_vertex(1))
        refused = await refusal(store.close_groups(RUN, [untrained], term=term))
        assert refused == "STATE_TRANSITION_REFUSED"
        missing = closure(a_vertex(7))
        assert await refusal(store.close_groups(RUN, [missing], term=term)) == "VERTEX_NOT_FOUND"
        assert await claimable(store) == []

    async def test_void_keeps_its_first_reason_and_is_no_longer_claimable(self, store, term):
        row = a_vertex()
        await write_rows(store, term, row)
        await store.close_groups(RUN, [closure(row)], term=term)
        for reason in (common.VOID_REASON_NON_FINITE, common.VOID_REASON_ROLLED_BACK):
            await store.void_rows(RUN, [pb.VoidedRow(row=ref(row), reason=reason)], term=term)
        found = (await store.get_vertices(RUN, [ref(row)]))[0].meta
        assert found.void_reason == common.VOID_REASON_NON_FINITE
        assert await claimable(store) == []


class TestMicroBatches:
    async def released(self, store, term, count=3):
        rows = [a_vertex(call) for call in range(count)]
        await write_rows(store, term, *rows)
        await store.close_groups(RUN, [closure(*rows)], term=term)
        return rows

    async def test_record_owns_its_rows(self, store, term):
        rows = await self.released(store, term)
        record = a_record(rows[0], rows[1], term=term)
        await store.create_micro_batch(RUN, record)
        await store.create_micro_batch(RUN, record)
        second = a_record(rows[1], rows[2], ordinal=1, term=term)
        assert await refusal(store.create_micro_batch(RUN, second)) == "ROW_ALREADY_MARKED"
        changed = a_record(rows[0], term=term)
        assert await refusal(store.create_micro_batch(RUN, changed)) == "CONTENT_MISMATCH"
        await store.create_micro_batch(RUN, a_record(rows[2], ordinal=1, term=term))
        records = await store.list_micro_batches(RUN, batch=0)
        assert [len(r.rows) for r in records] == [2, 1]
        assert not await store.list_micro_batches(RUN, batch=0, policy="q")
        assert not await store.list_micro_batches(RUN, batch=1)

    async def test_records_come_in_pages(self, store, term):
        rows = await self.released(store, term)
        for ordinal, row in enumerate(rows):
            await store.create_micro_batch(RUN, a_record(row, ordinal=ordinal, term=term))
        request = pb.ListMicroBatchesRequest(run_id=RUN, batch=0, page_size=2)
        first = await store._call("ListMicroBatches", request)
        request.page_token = first.next_page_token
        second = await store._call("ListMicroBatches", request)
        assert [len(page.micro_batches) for page in (first, second)] == [2, 1]
        assert not second.next_page_token
        found = [*first.micro_batches, *second.micro_batches]
        assert found == await store.list_micro_batches(RUN, batch=0)
        request.policy = "q"
        assert await refusal(store._call("ListMicroBatches", request)) == "INVALID_ARGUMENT"

    async def test_two_records_at_once_cannot_share_a_row(self, store, term):
        rows = await self.released(store, term, count=8)
        calls = [
            store.create_micro_batch(RUN, a_record(*rows, ordinal=number, term=term))
            for number in range(8)
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(result is None for result in results) == 1

    async def test_record_marks_its_rows_and_marks_can_be_driven_again(self, store, term):
        rows = await self.released(store, term)
        record = a_record(rows[0], term=term)
        await store.create_micro_batch(RUN, record)
        assert await claimable(store) == ["0:1", "0:2"]
        await store.mark_rows(RUN, record.micro_batch_id, record.rows, term=term)
        assert await claimable(store) == ["0:1", "0:2"]
        stolen = store.mark_rows(RUN, "b000000a0-m0009-p", record.rows, term=term)
        assert await refusal(stolen) == "ROW_ALREADY_MARKED"

    async def test_claimable_list_pages_and_sees_rows_released_behind_its_cursor(self, store, term):
        await store.write_graph(
            RUN,
            term=term,
            groups=[a_group(0), a_group(1)],
            vertices=[a_vertex(0, group=0), *(a_vertex(c, group=1) for c in range(5))],
        )
        later = [a_vertex(c, group=1) for c in range(5)]
        await store.close_groups(RUN, [closure(*later, group=1)], term=term)
        record = a_record(later[0], term=term)
        await store.create_micro_batch(RUN, record)
        await store.mark_rows(RUN, record.micro_batch_id, record.rows, term=term)
        chosen = pb.VertexFilter(claimable=True)
        paged = [v.meta.path async for v in store.list_vertices(RUN, chosen, page_size=2)]
        assert paged == ["0:1", "0:2", "0:3", "0:4"]
        await store.close_groups(RUN, [closure(a_vertex(0, group=0))], term=term)
        assert await claimable(store) == ["0:0", "0:1", "0:2", "0:3", "0:4"]

    async def test_rows_of_several_groups_are_listed_together_page_by_page(self, store, term):
        groups = [a_group(number) for number in range(4)]
        rows = [a_vertex(call, group=number) for number in range(4) for call in range(3)]
        await store.write_graph(RUN, term=term, groups=groups, vertices=rows)
        ids = [groups[number].group_id for number in (3, 1)]
        chosen = pb.VertexFilter(group_ids=ids)
        found = [v.meta async for v in store.list_vertices(RUN, chosen, page_size=2)]
        assert [meta.group_id for meta in found] == [ids[1]] * 3 + [ids[0]] * 3
        mixed = pb.VertexFilter(group_ids=ids, group_id=ids[0])
        with pytest.raises(FlexMarlError, match="group_ids"):
            _ = [v async for v in store.list_vertices(RUN, mixed)]

    async def test_unreleased_void_or_foreign_rows_are_refused(self, store, term):
        rows = [a_vertex(0), a_vertex(1)]
        await write_rows(store, term, *rows)
        record = a_record(rows[0], term=term)
        assert await refusal(store.create_micro_batch(RUN, record)) == "STATE_TRANSITION_REFUSED"
        await store.close_groups(RUN, [closure(rows[0], voided=(rows[1],))], term=term)
        void = a_record(rows[1], term=term)
        assert await refusal(store.create_micro_batch(RUN, void)) == "STATE_TRANSITION_REFUSED"
        foreign = a_record(rows[0], term=term)
        foreign.policy = "q"
        assert await refusal(store.create_micro_batch(RUN, foreign)) == "INVALID_ARGUMENT"
        unknown = a_record(a_vertex(9), term=term)
        assert await refusal(store.create_micro_batch(RUN, unknown)) == "VERTEX_NOT_FOUND"

    async def test_older_orchestrator_forms_nothing(self, store, term):
        rows = await self.released(store, term)
        await store.acquire_term(RUN, "orchestrator", holder="next")
        record = a_record(rows[0], term=term)
        assert await refusal(store.create_micro_batch(RUN, record)) == "TERM_STALE"

    async def test_account_adds_up(self, store, term):
        rows = [
            *(a_vertex(call) for call in range(4)),
            a_vertex(4, policy="frozen", trainable=False),
            a_vertex(5, status=common.VERTEX_STATUS_CANCELLED),
            a_vertex(6, status=common.VERTEX_STATUS_FAILED),
            a_vertex(7, agent="tool", policy="", kind=common.VERTEX_KIND_TOOL, trainable=False),
        ]
        await write_rows(store, term, *rows)
        await store.close_groups(RUN, [closure(*rows[:3], voided=(rows[3],))], term=term)
        record = a_record(rows[0], rows[1], term=term)
        await store.create_micro_batch(RUN, record)
        await store.mark_rows(RUN, record.micro_batch_id, record.rows, term=term)

        async def count(consumed):
            return await store.count_vertices(RUN, batch=0, batch_attempt=0, consumed=consumed)

        saved = await count([record.micro_batch_id])
        trained = saved.policies["p"]
        assert (trained.finished, trained.consumed, trained.cancelled) == (4, 2, 1)
        assert dict(trained.voided) == {"no_reward": 1}
        assert list(saved.open_rows) == [ref(rows[2])]
        assert saved.policies["frozen"].untrained == 1
        assert saved.policies[""].untrained == 1
        assert len((await count([])).open_rows) == 3
        assert not (await store.count_vertices(RUN, batch=0, batch_attempt=1, consumed=[])).policies


class TestStateAndCommit:
    async def save(self, store, term, version, *, policy="p", **refs):
        record = graph.StateRecord(policy=policy, version=version, term=term, **refs)
        await store.save_state(RUN, record)

    async def commit(self, store, term, version, weights):
        manifest = graph.Manifest(
            version=version,
            term=term,
            policies={"p": graph.PolicyManifest(weights=weights, state_version=version)},
        )
        expected = None if version == 0 else version - 1
        await store.commit(RUN, manifest, expected_version=expected)

    async def test_older_binding_saves_nothing(self, store):
        first = await store.acquire_term(RUN, "policy/p", holder="a")
        weights = await segment(store, "w0")
        second = await store.acquire_term(RUN, "policy/p", holder="b")
        assert second > first
        assert await refusal(self.save(store, first, 0, weights=weights)) == "TERM_STALE"
        await self.save(store, second, 0, weights=weights)
        assert (await store.get_state(RUN, "p")).term == second
        assert await store.get_state(RUN, "p", version=1) is None
        assert await store.get_state(RUN, "q") is None

    async def test_state_and_manifest_name_sealed_segments_only(self, store, term):
        bound = await store.acquire_term(RUN, "policy/p", holder="a")
        unsealed = await store.allocate_segment(RUN, "w0", [BufferSpec("w", "U8", (4,))])
        missing = common.ObjectRef(shard="s0", key="w0")
        assert await refusal(self.save(store, bound, 0, weights=missing)) == "SEGMENT_NOT_FOUND"
        assert await refusal(self.commit(store, term, 0, missing)) == "SEGMENT_NOT_FOUND"
        weights = await unsealed.seal()
        await self.save(store, bound, 0, weights=weights)
        await self.commit(store, term, 0, weights)

    async def test_commit_is_one_compare_and_set(self, store, term):
        weights = await segment(store, "w0")
        assert await store.get_manifest(RUN) is None
        early = store.commit(RUN, graph.Manifest(version=1, term=term), expected_version=0)
        assert await refusal(early) == "VERSION_MISMATCH"
        results = await asyncio.gather(
            *(self.commit(store, term, 0, weights) for _ in range(4)), return_exceptions=True
        )
        assert sum(result is None for result in results) == 1
        skipped = store.commit(RUN, graph.Manifest(version=2, term=term), expected_version=0)
        assert await refusal(skipped) == "INVALID_ARGUMENT"
        await store.acquire_term(RUN, "orchestrator", holder="next")
        assert await refusal(self.commit(store, term, 1, weights)) == "TERM_STALE"
        assert (await store.get_manifest(RUN)).version == 0

    async def test_superseded_segments_are_freed_and_their_pages_reused(self, store, term):
        bound = await store.acquire_term(RUN, "policy/p", holder="a")
        for version in range(4):
            weights = await segment(store, f"w{version}", size=100_000)
            gradients = await segment(store, f"g{version}")
            await self.save(store, bound, version, weights=weights)
            await self.save(store, bound, version, weights=weights, gradients=gradients)
            again = await segment(store, f"g{version}.1")
            await self.save(store, bound, version, weights=weights, gradients=again)
            assert not await sealed(store, f"g{version}")
            await self.commit(store, term, version, weights)
        kept = [name for name in ("w0", "w1", "w2", "w3") if await sealed(store, name)]
        assert kept == ["w2", "w3"]
        assert await sealed(store, "g3.1")
        assert not await sealed(store, "g2.1")
        reused = await store.allocate_segment(RUN, "w4", [BufferSpec("w", "U8", (100_000,))])
        assert reused.reused
        assert [m.version for m in await store.list_manifests(RUN)] == [0, 1, 2, 3]

    async def test_leased_segment_outlives_its_retirement(self, store, term):
        weights = [await segment(store, f"w{version}") for version in range(4)]
        reader = await store.open_segment(RUN, "w0", holder="engine")
        for version, each in enumerate(weights):
            await self.commit(store, term, version, each)
        assert bytes(reader.buffers["w"].data[:1]) == b"\x02"
        with pytest.raises(FlexMarlError, match="SEGMENT_NOT_FOUND"):
            await store.open_segment(RUN, "w0", holder="late")
        held = (await store.get_stats()).numbers["pool_bytes"]
        await reader.close()
        assert (await store.get_stats()).numbers["pool_bytes"] > held

    async def test_segment_on_its_way_into_a_record_survives_a_commit(self, store, term):
        bound = await store.acquire_term(RUN, "policy/p", holder="a")
        weights = [await segment(store, f"w{version}") for version in range(3)]
        on_its_way = await segment(store, "g2")
        for version, each in enumerate(weights):
            await self.commit(store, term, version, each)
        await self.save(store, bound, 2, weights=weights[2], gradients=on_its_way)

    async def test_everything_is_there_after_a_restart(self, tmp_path):
        async with serving(tmp_path) as (store, shard):
            memory_dir = shard.config.memory_dir
            await store.create_run(a_run())
            term = await store.acquire_term(RUN, "orchestrator", holder="a")
            bound = await store.acquire_term(RUN, "policy/p", holder="a")
            rows = [a_vertex(0), a_vertex(1)]
            await store.write_graph(
                RUN, term=term, groups=[a_group()], vertices=rows, samples=[a_sample()]
            )
            await store.close_groups(RUN, [closure(*rows)], term=term)
            await store.create_micro_batch(RUN, a_record(rows[0], term=term))
            weights = await segment(store, "w0")
            await self.save(store, bound, 0, weights=weights)
            await self.commit(store, term, 0, weights)
            assert memory_dir.exists()
        async with serving(tmp_path) as (store, _):
            assert (await store.get_run(RUN)).config_json == b"{}"
            assert await store.acquire_term(RUN, "orchestrator", holder="b") == term + 1
            assert list(await store.get_vertices(RUN, [ref(rows[0])]))
            assert await claimable(store) == ["0:1"]
            second = a_record(rows[0], ordinal=1, term=term + 1)
            assert await refusal(store.create_micro_batch(RUN, second)) == "ROW_ALREADY_MARKED"
            assert (await store.get_manifest(RUN)).policies["p"].weights == weights
            counts = await store.count_vertices(RUN, batch=0, batch_attempt=0, consumed=[])
            assert counts.policies["p"].finished == 2
            # The memory tier went with the host; the record without its file is not served.
            with pytest.raises(FlexMarlError, match="SEGMENT_NOT_FOUND"):
                await store.open_segment(RUN, "w0", holder="x")
