"""Stores with one committed batch, for tests that damage or copy them."""

from __future__ import annotations

from meg_store.store_harness import (
    RUN,
    SAMPLE,
    a_group,
    a_record,
    a_run,
    a_sample,
    a_vertex,
    closure,
    ref_on,
)

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.run_store import RunStore
from flexmarl.client.store import StoreClient

RECORD = "b000000a0-m0000-p"
NEXT_GROUP = "b000001a0-g0000"
NUM_GROUPS = 12
"""Of a run over several stores."""


async def fill(store: StoreClient) -> None:
    """One committed batch: two rows consumed, one void, one tool; an object; a second batch."""
    columns = [graph.Column(name="image", type=graph.COLUMN_TYPE_OBJECT)]
    bundle = await store.put_object(b"workflow", run_id=RUN)
    await store.create_run(a_run(columns=columns, workflow_bundle=bundle))
    term = await store.acquire_term(RUN, "orchestrator", holder="test")
    bound = await store.acquire_term(RUN, "policy/p", holder="test")
    image = await store.put_object(b"pixels" * 400_000)
    rows = [a_vertex(n, upstream_vertex_ids=[f"{SAMPLE}/0:{n - 1}"][:n]) for n in range(3)]
    rows[0].payload.columns["image"].object_value.CopyFrom(image)
    rows.append(a_vertex(3, agent="tool", policy="", kind=common.VERTEX_KIND_TOOL, trainable=False))
    await store.write_graph(RUN, term=term, groups=[a_group()], vertices=rows, samples=[a_sample()])
    ended = closure(*rows[:2], voided=(rows[2],))
    ended.released[1].merged_into = rows[0].meta.vertex_id
    await store.close_groups(RUN, [ended], term=term)
    record = a_record(*rows[:2], term=term)
    await store.create_micro_batch(RUN, record)
    await store.mark_rows(RUN, record.micro_batch_id, record.rows, term=term)
    for version in range(2):
        specs = [BufferSpec("w", "U8", (1000,))]
        writer = await store.allocate_segment(RUN, f"w{version}", specs, tier=pb.SEGMENT_TIER_DISK)
        writer.buffers["w"].data[:] = bytes([version + 1]) * 1000
        weights = await writer.seal(checksum=writer.content_hash())
        state = graph.StateRecord(policy="p", version=version, term=bound, weights=weights)
        if version:
            state.applied = True
            state.ledger.append(record.micro_batch_id)
        await store.save_state(RUN, state)
        manifest = graph.Manifest(
            version=version, term=term, policies={"p": graph.PolicyManifest(weights=weights)}
        )
        if version:
            counted = await store.count_vertices(
                RUN, batch=0, batch_attempt=0, consumed=[record.micro_batch_id]
            )
            manifest.batch.CopyFrom(
                graph.BatchRecord(
                    policies=counted.policies, consumed_micro_batch_ids=[record.micro_batch_id]
                )
            )
        await store.commit(RUN, manifest, expected_version=version - 1 if version else None)
    sample_id = f"{NEXT_GROUP}-s000a0"
    later = a_vertex(
        vertex_id=f"{sample_id}/0:0", sample_id=sample_id, group_id=NEXT_GROUP, batch=1
    )
    admitted = a_group(group_id=NEXT_GROUP, batch=1)
    await store.write_graph(RUN, term=term, groups=[admitted], vertices=[later])
    closed = closure(later)
    closed.group_id = NEXT_GROUP
    await store.close_groups(RUN, [closed], term=term)


async def fill_spread(store: RunStore) -> None:
    """One committed batch over all shards: a consumed and a void row in each group."""
    term = await store.acquire_term(RUN, "orchestrator", holder="test")
    bound = await store.acquire_term(RUN, "policy/p", holder="test")
    groups = [a_group(number) for number in range(NUM_GROUPS)]
    taken = [a_vertex(0, group=number) for number in range(NUM_GROUPS)]
    void = [a_vertex(1, group=number, agent="judge") for number in range(NUM_GROUPS)]
    samples = [a_sample(group=number) for number in range(NUM_GROUPS)]
    await store.write_graph(
        RUN, term=term, groups=groups, vertices=[*taken, *void], samples=samples
    )
    ends = []
    for number in range(NUM_GROUPS):
        end = closure(taken[number], group=number, voided=(void[number],))
        end.released[0].row.CopyFrom(ref_on(store, taken[number]))
        end.voided[0].row.CopyFrom(ref_on(store, void[number]))
        ends.append(end)
    await store.close_groups(RUN, ends, term=term)
    rows = [ref_on(store, vertex) for vertex in taken]
    record = graph.MicroBatch(micro_batch_id=RECORD, policy="p", rows=rows, term=term)
    await store.create_micro_batch(RUN, record)
    await store.mark_rows(RUN, RECORD, rows, term=term)
    for version in range(2):
        writer = await store.shards["s0"].allocate_segment(
            RUN, f"w{version}", [BufferSpec("w", "U8", (8,))], tier=pb.SEGMENT_TIER_DISK
        )
        weights = await writer.seal(checksum=writer.content_hash())
        state = graph.StateRecord(policy="p", version=version, term=bound, weights=weights)
        policies = {"p": graph.PolicyManifest(weights=weights, state_version=version)}
        manifest = graph.Manifest(version=version, term=term, policies=policies)
        if version:
            state.applied = True
            state.ledger.append(RECORD)
            counted = await store.count_vertices(RUN, batch=0, batch_attempt=0, consumed=[RECORD])
            manifest.batch.policies["p"].CopyFrom(counted.policies["p"])
            manifest.batch.consumed_micro_batch_ids.append(RECORD)
        await store.save_state(RUN, state)
        await store.commit(RUN, manifest, expected_version=version - 1 if version else None)
