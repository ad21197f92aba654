"""Reading a run back from the store: the only thing that a restart needs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from types import MappingProxyType

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.enums import GROUP_STATUS
from flexmarl.core.dataset_order import Cursor
from flexmarl.core.fencing import policy_scope
from flexmarl.core.run_effects import GroupSpec
from flexmarl.core.run_events import StoredGroup, StoredRecord, StoredRun
from flexmarl.core.states import GroupStatus
from flexmarl.core.training_rows import Row, SampleFact
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.convert import DONE, cursor_of, row_of, sample_fact, state_fact
from flexmarl.orchestrator.shard_loss import settle_losses

_NOT_VOID = common_pb2.VOID_REASON_UNSPECIFIED
_NO_ROWS: Mapping[str, Collection[Row]] = MappingProxyType({})


async def read_stored_run(
    context: RunContext, *, known_rows: Mapping[str, Collection[Row]] = _NO_ROWS
) -> StoredRun:
    """Reads what the store holds, and remembers in the context what effects will need of it.

    Args:
        context: The run.
        known_rows: Finished rows of groups that this process has seen; for those that were lost.
    """
    store, run_id = context.store, context.run_id
    context.manifest = await store.get_manifest(run_id)
    if store.lost:
        await _fence_trainers(context)
    for policy in sorted(context.config.policies):
        state = await store.get_state(run_id, policy)
        if state is not None:
            context.save_seen(state)
    states = {name: state_fact(state) for name, state in context.states.items()}
    if context.manifest is None:
        return StoredRun(states=states)
    batch = context.manifest.version
    groups, samples, records = await asyncio.gather(
        store.list_groups(run_id, batch=batch),
        store.list_samples(run_id, batch=batch),
        store.list_micro_batches(run_id, batch=batch),
    )
    attempt = context.batch_id(batch).attempt
    groups = [group for group in groups if group.batch_attempt == attempt]
    records = [record for record in records if record.batch_attempt == attempt]
    if store.lost:
        await settle_losses(context, groups, records, known_rows=known_rows)
    metas = [
        vertex.meta
        async for vertex in store.list_vertices(run_id, pb.VertexFilter(batch=batch, status=DONE))
        if vertex.meta.kind == common_pb2.VERTEX_KIND_AGENT and vertex.meta.batch_attempt == attempt
    ]
    evaluated = await _evaluated(context, batch)
    context.query_index.update((group.group_id, group.query_index) for group in groups)
    context.micro_batches.update((record.micro_batch_id, record) for record in records)
    void = {meta.vertex_id for meta in metas if meta.void_reason != _NOT_VOID}
    alive = {"", *store.shards}
    ledgers = {name for state in context.states.values() for name in state.ledger}
    return StoredRun(
        version=batch,
        cursor=cursor_of(context.manifest.cursor) if context.manifest else Cursor(),
        groups=tuple(
            _group(group, metas, shard=store.shard_of(group.group_id)) for group in groups
        ),
        samples=tuple(sample_fact(each) for each in samples if each.batch_attempt == attempt),
        records=tuple(_record(each, void, alive=alive, ledgers=ledgers) for each in records),
        states=states,
        evaluated=evaluated,
        returned_to=context.returned_to,
    )


async def _fence_trainers(context: RunContext) -> None:
    """Nobody may save a state any more that the groups in place of lost ones do not know of."""
    for policy in sorted(context.config.policies):
        scope = policy_scope(policy)
        await context.store.acquire_term(context.run_id, scope, holder="orchestrator")


async def _evaluated(context: RunContext, version: int) -> tuple[SampleFact, ...]:
    """Samples of the version's evaluation, where it has begun."""
    if not context.queries.held_out:
        return ()
    samples = await context.store.list_samples(context.run_id, batch=version, evaluation=True)
    return tuple(sample_fact(sample) for sample in samples)


def _group(group: graph_pb2.Group, metas: list[graph_pb2.VertexMeta], *, shard: str) -> StoredGroup:
    status = GROUP_STATUS.to_core(group.status)
    own = [meta for meta in metas if meta.group_id == group.group_id]
    ended = status is not GroupStatus.OPEN
    return StoredGroup(
        spec=GroupSpec(
            group_id=group.group_id,
            ordinal=group.ordinal,
            query_index=group.query_index,
            replaces=group.replaces_group_id,
            repeats=group.repeats_query,
        ),
        lost=bool(group.lost_shard),
        status=status,
        rows=tuple(row_of(meta, shard=shard) for meta in own) if ended else (),
        claimable=frozenset(
            meta.vertex_id
            for meta in own
            if meta.HasField("advantage") and meta.void_reason == _NOT_VOID
        ),
    )


def _record(
    record: graph_pb2.MicroBatch,
    void: set[str],
    *,
    alive: Collection[str],
    ledgers: Collection[str],
) -> StoredRecord:
    # The rows of a record are void together; where all went with a shard, the ledger tells.
    here = [ref.vertex_id for ref in record.rows if ref.shard in alive]
    voided = here[0] in void if here else record.micro_batch_id not in ledgers
    return StoredRecord(
        micro_batch_id=record.micro_batch_id,
        policy=record.policy,
        vertex_ids=tuple(ref.vertex_id for ref in record.rows),
        voided=voided,
    )
