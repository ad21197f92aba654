"""Whether a run of the quickstart, that nothing was lost of, is whole."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

from integration.cluster_harness import Size

from flexmarl.api.common.v1alpha1.common_pb2 import VERTEX_STATUS_DONE
from flexmarl.api.meg_store.v1alpha1.meg_store_pb2 import VertexFilter
from flexmarl.client.run_store import RunStore
from flexmarl.core.ids import BatchId, parse_batch

TRAINED = ("merger", "sorter", "splitter")


def num_reports(folder: Path) -> int:
    """Versions that the run's client has written down."""
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


async def assert_whole(store_address: str, run_id: str, size: Size) -> None:
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
                assert [(r.version, r.num_tokens) for r in v.version_runs] == [
                    (batch.batch, v.num_response_tokens)
                ]
            for policy in TRAINED:
                counts = batch.policies[policy]
                assert counts.finished == counts.consumed + sum(counts.voided.values())
                assert counts.consumed == sum(1 for v in done if v.policy == policy)
                assert after.policies[policy].num_updates == after.version
