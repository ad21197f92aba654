"""Taking a run up where its state was lost: back to the newest whole version, rows given up.

The store returns the run in one write. Rows of the batches that are attempted again are void then,
on every shard, and their open groups dropped: this is driven again at each start, and changes
nothing where it was done.
"""

from __future__ import annotations

from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.convert import DONE, chunks
from flexmarl.runtime.logging import get_logger

_log = get_logger(__name__)

_NOT_VOID: Final = common_pb2.VOID_REASON_UNSPECIFIED
_ROLLED_BACK: Final = common_pb2.VOID_REASON_ROLLED_BACK
_CHUNK: Final = 1000


async def return_to_whole(context: RunContext) -> None:
    """Have the run go on from what is there.

    Raises:
        DomainError: SEGMENT_NOT_FOUND: no version is whole.
    """
    answer = await context.store.return_to_whole(context.run_id, term=context.term)
    returns = answer.run.returns
    context.returned_to = tuple(each.version for each in returns)
    if answer.reset_policies:
        _log.warning(
            "state_was_lost",
            run=context.run_id,
            version=returns[-1].version if returns else None,
            policies=list(answer.reset_policies),
        )
    for batch in sorted({number for each in returns for number in _batches(each)}):
        await _give_up(context, batch)


def _batches(returned: graph_pb2.VersionReturn) -> range:
    return range(returned.version, returned.newest + 1)


async def _give_up(context: RunContext, batch: int) -> None:
    """Void the finished rows of earlier attempts of a batch, and drop their open groups."""
    store, run_id, term = context.store, context.run_id, context.term
    attempt = context.batch_id(batch).attempt
    voided = [
        pb.VoidedRow(
            row=common_pb2.VertexRef(
                shard=store.shard_of(meta.group_id), vertex_id=meta.vertex_id, agent=meta.agent
            ),
            reason=_ROLLED_BACK,
        )
        async for vertex in store.list_vertices(run_id, pb.VertexFilter(batch=batch, status=DONE))
        if (meta := vertex.meta).batch_attempt < attempt
        and meta.trainable
        and meta.void_reason == _NOT_VOID
    ]
    for rows in chunks(voided, _CHUNK):
        await store.void_rows(run_id, rows, term=term)
    dropped = [
        pb.GroupClosure(
            group_id=group.group_id,
            status=common_pb2.GROUP_STATUS_DROPPED,
            drop_reason=_ROLLED_BACK,
        )
        for group in await store.list_groups(run_id, batch=batch)
        if group.batch_attempt < attempt and group.status == common_pb2.GROUP_STATUS_OPEN
    ]
    if dropped:
        await store.close_groups(run_id, dropped, term=term)
