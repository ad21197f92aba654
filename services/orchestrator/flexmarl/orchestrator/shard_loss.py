"""A store shard that does not come back: what went with it, and how the run goes on.

noticed  a call failed for longer than shard_patience_s, or the home shard says so (`store lost`)
recorded on the home shard; the other services let go of the run, which is taken up again
taken up the shard's groups of the open batch are dropped, their queries come again; they are closed
         where every policy's update is made, so that nothing could be learnt from them any more
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.run_store import RunStore
from flexmarl.core.errors import ErrorReason
from flexmarl.core.ids import GroupId, group_of
from flexmarl.core.recovery import comes_again
from flexmarl.core.training_rows import Row
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.convert import cursor_of, state_fact

_CAUSES = (ErrorReason.UNAVAILABLE.value, ErrorReason.SHARD_LOST.value)


def lost_shard(store: RunStore, *, reason: str, metadata: Mapping[str, str]) -> str | None:
    """The shard whose loss a failure is, if it is one that the run can go on without."""
    shard = metadata.get("shard")
    is_other = shard in store.shards and shard != store.shard
    return shard if reason in _CAUSES and is_other else None


async def settle_losses(
    context: RunContext,
    groups: list[graph_pb2.Group],
    records: Sequence[graph_pb2.MicroBatch],
    *,
    known_rows: Mapping[str, Collection[Row]],
) -> None:
    """End what went with lost shards: groups on the home shard, rows of micro-batches with it.

    Args:
        context: The run.
        groups: Groups of the open batch that the shards have; lost ones are added.
        records: Micro-batch records of the batch.
        known_rows: Finished rows of groups, as far as this process has seen them.
    """
    store, run_id = context.store, context.run_id
    consumed = {name for state in context.states.values() for name in state.ledger}
    unconsumed = [record for record in records if record.micro_batch_id not in consumed]
    missing = _missing(context, groups, records)
    dropped = _comes_again(context)
    for shard in store.lost:
        gone = [group for group in missing if store.was_on(group.group_id, shard)]
        for group in gone:
            group.lost_shard = shard
            _end(group, dropped=dropped)
            group.lost_rows.update(_lost_rows(group.group_id, records, consumed, known_rows))
        if gone:
            await store.lose_shard(run_id, shard, term=context.term, groups=gone)
            groups.extend(gone)
    await _void_partners(context, unconsumed)


def _missing(
    context: RunContext,
    groups: Iterable[graph_pb2.Group],
    records: Iterable[graph_pb2.MicroBatch],
) -> list[graph_pb2.Group]:
    """Groups of the batch that some shard must have had, with the queries that they took."""
    manifest = context.manifest
    assert manifest is not None, "a batch begins with a manifest"
    batch = context.batch_id(manifest.version)
    by_ordinal = {group.ordinal: group for group in groups}
    named = {GroupId.parse(group_of(ref.vertex_id)) for each in records for ref in each.rows}
    seen = {group_id.ordinal for group_id in named} | set(by_ordinal)
    if not seen:
        return []
    order, cursor = context.order, cursor_of(manifest.cursor)
    left = order.left(cursor)
    first = context.config.batch.groups if left is None else min(context.config.batch.groups, left)
    missing: list[graph_pb2.Group] = []
    position = 0
    for ordinal in range(max(first, max(seen) + 1)):
        known = by_ordinal.get(ordinal)
        if known is not None:
            position += not known.repeats_query
            continue
        missing.append(
            graph_pb2.Group(
                group_id=str(GroupId(batch, ordinal)),
                batch=manifest.version,
                batch_attempt=batch.attempt,
                ordinal=ordinal,
                query_index=order.row_at(order.advance(cursor, position)),
                num_samples=context.config.batch.samples_per_group,
            )
        )
        position += 1
    return missing


def _comes_again(context: RunContext) -> bool:
    manifest = context.manifest
    assert manifest is not None, "a batch begins with a manifest"
    trained = [name for name, p in context.config.policies.items() if p.kind == "trained"]
    states = {name: state_fact(state) for name, state in context.states.items()}
    return comes_again(trained, states, batch=manifest.version)


def _end(group: graph_pb2.Group, *, dropped: bool) -> None:
    group.status = common_pb2.GROUP_STATUS_CLOSED
    if dropped:
        group.status = common_pb2.GROUP_STATUS_DROPPED
        group.drop_reason = common_pb2.VOID_REASON_GROUP_DROPPED


def _lost_rows(
    group_id: str,
    records: Iterable[graph_pb2.MicroBatch],
    consumed: Collection[str],
    known_rows: Mapping[str, Collection[Row]],
) -> Counter[str]:
    """Finished rows of a group that no saved gradient contains, by policy."""
    policies = {row.vertex_id: row.policy for row in known_rows.get(group_id, ()) if row.trainable}
    for record in records:
        for ref in record.rows:
            if record.micro_batch_id in consumed:
                policies.pop(ref.vertex_id, None)
            elif group_of(ref.vertex_id) == group_id:
                policies[ref.vertex_id] = record.policy
    return Counter(policies.values())


async def _void_partners(context: RunContext, records: Iterable[graph_pb2.MicroBatch]) -> None:
    """Void the rows that share an unconsumed micro-batch with lost ones: it cannot be computed."""
    alive = {"", *context.store.shards}
    reason = common_pb2.VOID_REASON_GROUP_DROPPED
    voided = [
        pb.VoidedRow(row=ref, reason=reason)
        for record in records
        if any(ref.shard not in alive for ref in record.rows)
        for ref in record.rows
        if ref.shard in alive
    ]
    if voided:
        await context.store.void_rows(context.run_id, voided, term=context.term)
