"""Whether a run of the quickstart, that nothing was lost of, is whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

from integration.cluster_harness import Size

from flexmarl.api.common.v1.common_pb2 import SAMPLE_STATUS_DONE, VERTEX_STATUS_DONE
from flexmarl.api.meg_store.v1.meg_store_pb2 import VertexFilter
from flexmarl.client.run_store import RunStore
from flexmarl.core.ids import BatchId, is_evaluation, parse_batch

TRAINED = ("merger", "sorter", "splitter")


def num_reports(folder: Path) -> int:
    """Versions that the run's client has written down."""
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


async def assert_evaluated(
    store_address: str, run_id: str, versions: Collection[int], *, samples: int
) -> None:
    """Each of these versions, and no other, was evaluated, and nothing of it was trained on."""
    async with RunStore.connect(store_address) as store:
        await store.get_run(run_id)
        groups = await store.list_groups(run_id)
        held_out = {group.query_json for group in groups if is_evaluation(group.group_id)}
        assert held_out
        assert held_out.isdisjoint(g.query_json for g in groups if not is_evaluation(g.group_id))
        rows = [v.meta async for v in store.list_vertices(run_id, VertexFilter(id_prefix="e"))]
        assert {row.batch for row in rows} == set(versions)
        for row in rows:
            assert row.policy_version == row.batch
            assert not row.HasField("advantage")
            assert not row.micro_batch_id
        for version in versions:
            ended = await store.list_samples(run_id, batch=version, evaluation=True)
            assert len(ended) == len(held_out) * samples
            assert {sample.status for sample in ended} == {SAMPLE_STATUS_DONE}


async def assert_whole(
    store_address: str, run_id: str, size: Size, *, trained: Collection[str] = TRAINED
) -> None:
    """I4, I5, I7, I9 by what the run's stores hold."""
    async with RunStore.connect(store_address) as store:
        await store.get_run(run_id)
        manifests = await store.list_manifests(run_id)
        assert [m.version for m in manifests] == list(range(size.versions + 1))
        for before, after in pairwise(manifests):
            batch = after.batch
            assert batch.batch == before.version
            in_ledgers = set(batch.consumed_micro_batch_ids)
            assert len(in_ledgers) == len(batch.consumed_micro_batch_ids)
            records = await store.list_micro_batches(run_id, batch=batch.batch)
            consumed = Counter(
                row.vertex_id
                for record in records
                if record.micro_batch_id in in_ledgers
                for row in record.rows
            )
            assert set(consumed.values()) == {1}, "a row is in two committed micro-batches"
            assert len(consumed) == size.vertices
            wanted = VertexFilter(batch=batch.batch)
            vertices = [v async for v in store.list_vertices(run_id, wanted)]
            current = BatchId(batch.batch, batch.batch_attempt)
            done = [v.meta for v in vertices if v.meta.status == VERTEX_STATUS_DONE]
            assert {v.vertex_id for v in done} == set(consumed)
            assert {parse_batch(v.vertex_id) for v in done} == {current}
            for v in done:
                assert v.policy_version == batch.batch
                assert v.weights_hash == before.policies[v.policy].weights_hash
                # More than one where a call went on at another instance with the tokens it had.
                assert {run.version for run in v.version_runs} == {batch.batch}
                assert sum(run.num_tokens for run in v.version_runs) == v.num_response_tokens
            for policy in trained:
                counts = batch.policies[policy]
                assert counts.finished == counts.consumed + sum(counts.voided.values())
                assert counts.consumed == sum(1 for v in done if v.policy == policy)
                assert after.policies[policy].num_updates == after.version
