"""More samples than a group needs, on real services: the slowest are cut, and count nowhere."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from integration.cluster_harness import Cluster, Size

from flexmarl.api.common.v1.common_pb2 import (
    SAMPLE_STATUS_CANCELLED,
    SAMPLE_STATUS_DONE,
    VERTEX_STATUS_DONE,
)
from flexmarl.api.meg_store.v1.meg_store_pb2 import VertexFilter
from flexmarl.client.run_store import RunStore

SIZE = Size(versions=3, groups=4, samples=3)
REDUNDANT = 2
RUN = "more-than-needed"
POLICIES = ("splitter", "sorter", "merger")


@pytest.fixture
def cluster(tmp_path: Path):
    cluster = Cluster(tmp_path / "cluster")
    cluster.up()
    yield cluster
    cluster.down()


@pytest.mark.real
@pytest.mark.timeout(240)
async def test_redundant_samples_are_cut_and_nothing_of_them_is_trained_on(
    cluster: Cluster, tmp_path: Path
):
    sets = {"batch.redundant_samples": REDUNDANT}
    # Two requests at a time: samples of a group end one after the other.
    sets |= {f"policies.{name}.rollout.max_concurrency": 2 for name in POLICIES}
    more = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    training = cluster.train(RUN, SIZE, tmp_path / "out", *more)
    said, _ = training.communicate(timeout=200)
    assert training.returncode == 0, said
    lines = (tmp_path / "out" / RUN / "metrics.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == SIZE.versions
    cut = 0
    async with RunStore.connect(cluster.address("meg_store")) as store:
        await store.get_run(RUN)
        manifests = await store.list_manifests(RUN)
        assert [m.version for m in manifests] == list(range(SIZE.versions + 1))
        for before, after in pairwise(manifests):
            number = before.version
            samples = {s.sample_id: s for s in await store.list_samples(RUN, batch=number)}
            started = Counter(s.group_id for s in samples.values())
            assert set(started.values()) == {SIZE.samples + REDUNDANT}
            statuses = {s.status for s in samples.values()}
            assert statuses <= {SAMPLE_STATUS_DONE, SAMPLE_STATUS_CANCELLED}
            cut += sum(s.status == SAMPLE_STATUS_CANCELLED for s in samples.values())
            vertices = [v.meta async for v in store.list_vertices(RUN, VertexFilter(batch=number))]
            done = [v for v in vertices if v.status == VERTEX_STATUS_DONE]
            in_ledgers = set(after.batch.consumed_micro_batch_ids)
            trained = {
                row.vertex_id
                for record in await store.list_micro_batches(RUN, batch=number)
                if record.micro_batch_id in in_ledgers
                for row in record.rows
            }
            # As many whole samples of each group as it shall have, and nothing of any other.
            of_samples = {name.partition("/")[0] for name in trained}
            per_group = Counter(samples[name].group_id for name in of_samples)
            assert set(per_group.values()) == {SIZE.samples}
            assert len(per_group) == SIZE.groups
            assert {samples[name].status for name in of_samples} == {SAMPLE_STATUS_DONE}
            assert len(trained) == SIZE.vertices
            voided = sum(after.batch.policies[p].voided["redundant"] for p in POLICIES)
            assert voided == len(done) - len(trained)
            for policy in POLICIES:
                counts = after.batch.policies[policy]
                assert counts.finished == counts.consumed + sum(counts.voided.values())
    assert cut, "every sample ended before its group was full: the test shows nothing"
