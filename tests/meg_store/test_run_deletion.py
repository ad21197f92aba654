"""DeleteRun: nothing of the run is left, nothing of others is gone, the space is given back."""

from __future__ import annotations

import asyncio
import os

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
    serving,
)

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import Buffer, BufferSpec
from flexmarl.client.errors import NotFoundError, RefusedError
from flexmarl.meg_store.backend import TABLES, Table


async def fill(store, run_id: str, *, rows: int = 3) -> None:
    """A run with something of everything."""
    dataset = await store.put_object(b"rows")
    image = await store.put_object(b"image", key="image")
    columns = [graph.Column(name="seen", type=graph.COLUMN_TYPE_OBJECT)]
    await store.create_run(a_run(run_id=run_id, dataset=dataset, columns=columns))
    term = await store.acquire_term(run_id, "orchestrator", holder="test")
    vertices = [a_vertex(number, tokens=200) for number in range(rows)]
    vertices[0].payload.columns["seen"].object_value.CopyFrom(image)
    await store.write_graph(
        run_id, term=term, groups=[a_group()], vertices=vertices, samples=[a_sample()]
    )
    late = a_vertex(0, tokens=1)
    await store.write_graph(run_id, term=term, vertices=[late])
    await store.close_groups(run_id, [closure(*vertices)], term=term)
    await store.create_micro_batch(run_id, a_record(vertices[0], term=term))
    await store.mark_rows(run_id, "b000000a0-m0000-p", [ref(vertices[0])], term=term)
    await store.close_subgraph(run_id, [pb.ClosedSubgraph(policy="p")], term=term)
    bound = await store.acquire_term(run_id, "policy/p", holder="test")
    buffer = Buffer(BufferSpec("w", "U8", (64,)), memoryview(bytes(64)))
    weights = await store.set(run_id, f"{run_id}.w0", [buffer])
    await store.save_state(run_id, graph.StateRecord(policy="p", term=bound, weights=weights))
    policies = {"p": graph.PolicyManifest(weights=weights)}
    manifest = graph.Manifest(version=0, term=term, policies=policies)
    await store.commit(run_id, manifest, expected_version=None)
    await store._stub.PinVersion(
        pb.PinVersionRequest(request_id="pin", run_id=run_id, version=0, holder="x", ttl_s=60)
    )


def keys_of(shard, run_id: str) -> list[bytes]:
    name = run_id.encode()
    found = []
    for table in TABLES:
        for key, _ in shard.database.backend.scan(table, b"", None):
            if name in key.split(b"\0") or name + b".w0" in key:
                found.append(key)
    return found


async def test_nothing_is_left_and_others_stay(opened):
    store, shard = opened
    await fill(store, RUN)
    await fill(store, RUN + "2")
    await fill(store, "ru")
    others = len(keys_of(shard, "ru")), len(keys_of(shard, RUN + "2"))
    assert keys_of(shard, RUN)
    await store.delete_run(RUN)
    assert keys_of(shard, RUN) == []
    assert (len(keys_of(shard, "ru")), len(keys_of(shard, RUN + "2"))) == others
    assert shard.objects.require("image").reference_count == 2
    with pytest.raises(NotFoundError, match="RUN_NOT_FOUND"):
        await store.get_run(RUN)
    await store.delete_run(RUN)  # again: nothing to do
    assert sorted(run.run_id for run in await store.list_runs()) == ["ru", RUN + "2"]


async def test_id_can_be_used_again(opened):
    store, shard = opened
    for _ in range(2):
        await fill(store, RUN)
        claimable = pb.VertexFilter(claimable=True)
        rows = [v.meta.path async for v in store.list_vertices(RUN, claimable)]
        assert rows == ["0:1", "0:2"]
        assert await store.acquire_term(RUN, "orchestrator", holder="x") == 2
        await store.delete_run(RUN)
    assert keys_of(shard, RUN) == []


async def test_repeated_call_is_answered(opened):
    store = opened[0]
    await fill(store, RUN)
    request = pb.DeleteRunRequest(request_id="once", run_id=RUN)
    for _ in range(2):
        assert await store._stub.DeleteRun(request) == pb.DeleteRunResponse()
    with pytest.raises(NotFoundError, match="RUN_NOT_FOUND"):
        await store._stub.DeleteRun(pb.DeleteRunRequest(request_id="other", run_id=RUN))


async def test_driven_run_is_refused(store, term):
    await store.update_run_status(RUN, common.RUN_STATUS_RUNNING, term=term)
    with pytest.raises(RefusedError, match="stop it before"):
        await store.delete_run(RUN)
    await store.update_run_status(RUN, common.RUN_STATUS_STOPPED, term=term)
    await store.delete_run(RUN)


async def test_watch_of_a_deleted_run_ends(store):
    watch = store.watch(RUN)
    await anext(watch)
    waiting = asyncio.create_task(anext(watch))
    await asyncio.sleep(0.05)
    await store.delete_run(RUN)
    with pytest.raises(NotFoundError, match="RUN_NOT_FOUND"):
        async with asyncio.timeout(20):
            while True:
                await waiting
                waiting = asyncio.create_task(anext(watch))


async def test_mapped_segment_stays_until_it_is_closed(opened):
    store, shard = opened
    await fill(store, RUN)
    async with store.get(RUN, f"{RUN}.w0") as reader:
        await store.delete_run(RUN)
        assert bytes(reader.buffers["w"].data) == bytes(64)
        assert shard.files.used_bytes[pb.SEGMENT_TIER_MEMORY] == 64
    assert shard.files.used_bytes[pb.SEGMENT_TIER_MEMORY] == 0


def folder_bytes(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.blob"))


async def test_space_of_removed_objects_is_given_back(tmp_path):
    async with serving(tmp_path) as (store, shard):
        kept = await store.put_object(os.urandom(3 << 20))
        for _ in range(4):
            await store.put_object(os.urandom(4 << 20))
        await store.create_run(a_run(dataset=kept))
        await shard.database.compact([(Table.BLOBS, None, None)])
        before = folder_bytes(tmp_path / "db")
        assert before > 18 << 20
        assert await shard.objects.sweep_orphans(ttl_s=0, now=0) == 4
        await shard.database.compact([(Table.BLOBS, None, None)])
        assert folder_bytes(tmp_path / "db") < 5 << 20
        assert len(await store.get_object(kept.key)) == 3 << 20
