"""What a run left in the store, so that two runs can be compared to the last token and digit."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flexmarl.api.common.v1.common_pb2 import (
    GROUP_STATUS_OPEN,
    RUN_STATUS_FINISHED,
    VERTEX_STATUS_DONE,
)
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1.meg_store_pb2 import (
    EVENT_KIND_GROUP,
    EVENT_KIND_RUN,
    EVENT_KIND_STATE,
    EVENT_KIND_SUBGRAPH_CLOSED,
    VERTEX_VIEW_FULL,
    VertexFilter,
)
from flexmarl.client.store import StoreClient
from flexmarl.core.ids import SampleId, parse_batch

_DTYPES = {"F64": np.float64, "F32": np.float32}

Call = tuple[str, int, str]
"""Group, sample's ordinal, and path: what a call is called in every run alike."""


@dataclass
class Facts:
    """One run.

    Attributes:
        versions: Committed versions after version 0.
        tokens: Sampled tokens of each call.
        weights: Final weights, by policy and name.
        finished, consumed, void: Counts over all batches.
        doubled: Rows that are in more than one committed micro-batch.
        lost: Finished rows that are neither consumed nor void, by both accounts.
        early_closures, early_updates: Subgraphs closed, and updates saved, while groups of their
            batch were open.
    """

    versions: int = 0
    tokens: dict[Call, tuple[int, ...]] = field(default_factory=dict)
    weights: dict[tuple[str, str], NDArray[np.float64]] = field(default_factory=dict)
    finished: int = 0
    consumed: int = 0
    void: int = 0
    doubled: int = 0
    lost: int = 0
    early_closures: int = 0
    early_updates: int = 0


async def read_facts(store: StoreClient, run_id: str) -> Facts:
    """Reads all that is to be compared."""
    facts = Facts()
    manifests = await store.list_manifests(run_id)
    assert [m.version for m in manifests] == list(range(len(manifests))), "versions follow"
    facts.versions = len(manifests) - 1
    for _, after in pairwise(manifests):
        await _read_batch(store, run_id, after, facts)
    await _read_order(store, run_id, facts)
    for policy, entry in manifests[-1].policies.items():
        async with store.open_segment(run_id, entry.weights.key, holder="proof") as segment:
            for name, buffer in segment.buffers.items():
                values = np.frombuffer(buffer.data, dtype=_DTYPES[buffer.spec.dtype])
                facts.weights[policy, name] = values.astype(np.float64)
    return facts


async def _read_batch(
    store: StoreClient, run_id: str, manifest: graph_pb2.Manifest, facts: Facts
) -> None:
    batch = manifest.batch
    for counts in batch.policies.values():
        facts.finished += counts.finished
        facts.consumed += counts.consumed
        facts.void += sum(counts.voided.values())
    records = await store.list_micro_batches(run_id, batch=batch.batch)
    ledgers = set(batch.consumed_micro_batch_ids)
    consumed = Counter(
        row.vertex_id
        for record in records
        if record.micro_batch_id in ledgers
        for row in record.rows
    )
    facts.doubled += sum(count > 1 for count in consumed.values())
    wanted = VertexFilter(batch=batch.batch, status=VERTEX_STATUS_DONE)
    async for vertex in store.list_vertices(run_id, wanted, view=VERTEX_VIEW_FULL):
        meta = vertex.meta
        voided = meta.void_reason != 0
        facts.lost += not voided and meta.vertex_id not in consumed
        facts.doubled += voided and meta.vertex_id in consumed
        call = (meta.group_id, SampleId.parse(meta.sample_id).ordinal, meta.path)
        assert call not in facts.tokens, f"{call} is there twice"
        facts.tokens[call] = tuple(vertex.payload.response_tokens)


async def _read_order(store: StoreClient, run_id: str, facts: Facts) -> None:
    """What came before the last group of its batch ended, by the order of the run's events."""
    closures: list[int] = []
    updates: list[int] = []
    kinds = (EVENT_KIND_GROUP, EVENT_KIND_STATE, EVENT_KIND_SUBGRAPH_CLOSED, EVENT_KIND_RUN)
    async with aclosing(store.watch(run_id, kinds=kinds)) as watching:
        async for watched in watching:
            for event in watched.events:
                match event.WhichOneof("subject"):
                    case "closed_subgraph":
                        closures.append(event.closed_subgraph.batch)
                    case "state" if event.state.applied:
                        updates.append(event.state.version - 1)
                    case "group" if event.group.status != GROUP_STATUS_OPEN:
                        batch = parse_batch(event.group.group_id).batch
                        facts.early_closures += closures.count(batch)
                        facts.early_updates += updates.count(batch)
                        closures = [number for number in closures if number != batch]
                        updates = [number for number in updates if number != batch]
                    case "run" if event.run.status == RUN_STATUS_FINISHED:
                        return


def differences(one: Facts, other: Facts) -> tuple[int, float]:
    """Calls whose tokens differ, and the largest difference between two weights."""
    calls = one.tokens.keys() | other.tokens.keys()
    tokens = sum(one.tokens.get(call) != other.tokens.get(call) for call in calls)
    assert one.weights.keys() == other.weights.keys()
    weights = max(
        float(np.max(np.abs(values - other.weights[name]))) for name, values in one.weights.items()
    )
    return tokens, weights
