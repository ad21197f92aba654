"""Effects on the MEG Store: groups, rows, micro-batches, and the commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.errors import DeadlineError
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import is_evaluation
from flexmarl.core.run_effects import (
    AdmitGroups,
    CloseGroup,
    CloseSubgraphs,
    Commit,
    CountVertices,
    CreateMicroBatch,
    GroupSpec,
    MarkRows,
    ReadRows,
    VoidRows,
)
from flexmarl.core.run_events import Counted, RowsRead
from flexmarl.core.training_rows import Row
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.convert import (
    DONE,
    closure_of,
    cursor_message,
    policy_manifest,
    row_of,
    vertex_refs,
    voided_by_reason,
    voided_row,
)
from flexmarl.runtime.aio import Coalescer

READ_PAGE: Final = 5000

RecordOf = Callable[[Commit, pb.CountVerticesResponse], graph_pb2.BatchRecord]
"""Makes the account of the batch that a commit ends."""


class StoreEffects:
    """Executes effects on the run's shards.

    Every call repeats itself while a store is away (`RunStore`) and changes nothing when it is
    repeated after it took effect.

    Args:
        context: The run.
        record_of: Makes batch records.
    """

    def __init__(self, context: RunContext, record_of: RecordOf) -> None:
        self._context = context
        self._record_of = record_of
        self._counts = pb.CountVerticesResponse()
        self._consumed: tuple[str, ...] = ()
        # Groups that end together are closed in one write.
        self._closures: Coalescer[pb.GroupClosure, None] = Coalescer(
            self._close_all, name="group closures", max_batch_items=64, max_in_flight=2
        )
        self._reads: Coalescer[ReadRows, RowsRead] = Coalescer(
            self._read_all, name="group reads", max_batch_items=1024, max_in_flight=2
        )

    async def admit_groups(self, effect: AdmitGroups) -> None:
        """Write the groups."""
        now_ns = time.time_ns()
        context = self._context
        groups = [self._group(effect.batch, spec, now_ns) for spec in effect.groups]
        context.query_index.update((spec.group_id, spec.query_index) for spec in effect.groups)
        await context.store.write_graph(context.run_id, term=context.term, groups=groups)

    async def read_rows(self, effect: ReadRows) -> RowsRead:
        """Read the finished vertices of a group, together with other groups that end now."""
        return await self._reads.submit(effect)

    async def close_group(self, effect: CloseGroup) -> None:
        """Close the group, together with others that end now."""
        await self._closures.submit(closure_of(effect))

    async def close_subgraphs(self, effect: CloseSubgraphs) -> None:
        """Mark the subgraphs closed."""
        context = self._context
        attempt = context.batch_id(effect.batch).attempt
        marks = [
            pb.ClosedSubgraph(batch=effect.batch, batch_attempt=attempt, policy=policy)
            for policy in effect.policies
        ]
        await context.store.close_subgraph(context.run_id, marks, term=context.term)

    async def create_micro_batch(self, effect: CreateMicroBatch) -> None:
        """Write the record."""
        context = self._context
        record = graph_pb2.MicroBatch(
            micro_batch_id=effect.micro_batch_id,
            policy=effect.policy,
            batch=effect.batch,
            batch_attempt=context.batch_id(effect.batch).attempt,
            rows=vertex_refs(effect.rows),
            term=context.term,
            num_tokens=sum(row.num_tokens for row in effect.rows),
            created_unix_ns=time.time_ns(),
        )
        await context.store.create_micro_batch(context.run_id, record)
        context.micro_batches[effect.micro_batch_id] = record

    async def mark_rows(self, effect: MarkRows) -> None:
        """Mark the rows of a record."""
        context = self._context
        await context.store.mark_rows(
            context.run_id,
            effect.micro_batch_id,
            context.micro_batches[effect.micro_batch_id].rows,
            term=context.term,
        )

    async def void_rows(self, effect: VoidRows) -> None:
        """Void rows that were left over."""
        context = self._context
        await context.store.void_rows(
            context.run_id, [voided_row(item) for item in effect.rows], term=context.term
        )

    async def count_vertices(self, effect: CountVertices) -> Counted:
        """Have the batch counted; the counts go into its record."""
        context = self._context
        self._consumed = effect.consumed
        self._counts = await context.store.count_vertices(
            context.run_id,
            batch=effect.batch,
            batch_attempt=context.batch_id(effect.batch).attempt,
            consumed=effect.consumed,
        )
        refs = self._counts.open_rows
        if not refs:
            return Counted((), voided_by_reason(self._counts))
        vertices = await context.store.get_vertices(context.run_id, refs, view=pb.VERTEX_VIEW_META)
        shard_of = context.store.shard_of
        return Counted(tuple(row_of(v.meta, shard=shard_of(v.meta.group_id)) for v in vertices))

    async def commit(self, effect: Commit) -> None:
        """Write the manifest; a repeated commit of this orchestrator is the same one."""
        context = self._context
        manifest = graph_pb2.Manifest(
            version=effect.version,
            cursor=cursor_message(effect.cursor),
            term=context.term,
            committed_unix_ns=0,
        )
        stepped = effect.stepped
        if context.manifest is None:
            stepped = tuple(context.states)
        else:
            for name, entry in context.manifest.policies.items():
                manifest.policies[name].CopyFrom(entry)
            manifest.batch.CopyFrom(self._record_of(effect, self._counts))
            manifest.batch.consumed_micro_batch_ids.extend(self._consumed)
        for name in stepped:
            state = context.states[name]
            if state.version != effect.version:
                raise DomainError(
                    ErrorReason.INTERNAL,
                    f"policy {name}: its newest state is of version {state.version}, "
                    f"not {effect.version}",
                )
            manifest.policies[name].CopyFrom(policy_manifest(state))
        await self._commit(manifest, effect.expected_version)
        context.manifest = manifest
        # Groups of the next batch are admitted after this, and its records come later still.
        context.micro_batches.clear()
        context.query_index.clear()

    async def _commit(self, manifest: graph_pb2.Manifest, expected: int | None) -> None:
        context = self._context
        try:
            await context.store.commit(context.run_id, manifest, expected_version=expected)
        except DomainError as error:
            if not isinstance(error, DeadlineError) and (
                error.reason is not ErrorReason.VERSION_MISMATCH
            ):
                raise
            # It may have taken effect, with the answer lost.
            newest = await context.store.get_manifest(context.run_id, version=manifest.version)
            if newest is None or newest.term != context.term:
                raise
        manifest.committed_unix_ns = time.time_ns()

    async def _close_all(self, closures: list[pb.GroupClosure]) -> list[None]:
        context = self._context
        await context.store.close_groups(context.run_id, closures, term=context.term)
        return [None] * len(closures)

    async def _read_all(self, effects: list[ReadRows]) -> list[RowsRead]:
        wanted: dict[str, list[Row]] = {effect.group_id: [] for effect in effects}
        chosen = pb.VertexFilter(batch=effects[0].batch, group_ids=wanted, status=DONE)
        await self._read(chosen, wanted)
        return [RowsRead(tuple(wanted[effect.group_id])) for effect in effects]

    async def _read(self, chosen: pb.VertexFilter, into: dict[str, list[Row]]) -> None:
        context = self._context
        shard_of = context.store.shard_of
        pages = context.store.list_vertices(context.run_id, chosen, page_size=READ_PAGE)
        async for vertex in pages:
            meta = vertex.meta
            rows = into.get(meta.group_id)
            if rows is not None and meta.kind == common_pb2.VERTEX_KIND_AGENT:
                rows.append(row_of(meta, shard=shard_of(meta.group_id)))

    def _num_samples(self, group_id: str) -> int:
        config = self._context.config
        if is_evaluation(group_id):
            return config.evaluation.samples + config.evaluation.greedy
        return config.batch.samples_per_group

    def _group(self, batch: int, spec: GroupSpec, now_ns: int) -> graph_pb2.Group:
        context = self._context
        return graph_pb2.Group(
            group_id=spec.group_id,
            batch=batch,
            batch_attempt=context.batch_id(batch).attempt,
            ordinal=spec.ordinal,
            query_index=spec.query_index,
            query_json=context.query_at(spec.group_id, spec.query_index),
            num_samples=self._num_samples(spec.group_id),
            status=common_pb2.GROUP_STATUS_OPEN,
            replaces_group_id=spec.replaces,
            repeats_query=spec.repeats,
            opened_unix_ns=now_ns,
        )
