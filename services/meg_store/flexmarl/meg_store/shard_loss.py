"""What the home shard keeps of a shard that is lost: that it is, and what went with it.

A group that went is kept here as a dropped one, or as a closed one where its batch was trained by
then, with the number of its finished rows that were not consumed: they count as void
(group_dropped). Rows that were consumed are named by their records.
"""

from __future__ import annotations

from collections.abc import Collection

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import fencing
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import BatchId
from flexmarl.core.states import VoidReason
from flexmarl.meg_store import vertex_checks as checks
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Database, Draft
from flexmarl.meg_store.graph_writes import group_event
from flexmarl.meg_store.micro_batches import record_key
from flexmarl.meg_store.runs import RunEntry, Runs

_ENDS = (
    (common_pb2.GROUP_STATUS_DROPPED, common_pb2.VOID_REASON_GROUP_DROPPED),
    (common_pb2.GROUP_STATUS_CLOSED, common_pb2.VOID_REASON_UNSPECIFIED),
)


class ShardLoss:
    """Records losses for the runs whose home is here."""

    def __init__(self, database: Database, runs: Runs) -> None:
        self._database = database
        self._runs = runs

    def lose(self, draft: Draft, request: pb.LoseShardRequest) -> pb.LoseShardResponse:
        """Record a loss; doing it again changes nothing, and may name further groups.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE, SHARD_NOT_FOUND, INVALID_ARGUMENT for the home
                shard or a group that has not ended.
        """
        entry = self._runs.require(request.run_id)
        self._runs.require_home(entry)
        if request.term or request.groups:
            self._runs.check_term(draft, entry, fencing.ORCHESTRATOR_SCOPE, request.term)
        self._check_shard(entry, request.shard)
        run = self._runs.read(request.run_id)
        if request.shard not in run.lost_shards:
            run.lost_shards.append(request.shard)
            self._runs.put(draft, run)
        for group in request.groups:
            if group.lost_shard != request.shard:
                raise ValueError(f"group {group.group_id!r} did not go with {request.shard!r}")
            self._keep(draft, request.run_id, group)
        return pb.LoseShardResponse(run=run)

    def count(self, request: pb.CountVerticesRequest, response: pb.CountVerticesResponse) -> None:
        """Add what lost shards held of a batch to the account of the home shard."""
        entry = self._runs.require(request.run_id)
        lost = frozenset(entry.run.lost_shards)
        if not lost:
            return
        stem = f"{BatchId(request.batch, request.batch_attempt)}-"
        prefix = keys.prefix("group", request.run_id) + stem.encode()
        for _, value in self._database.scan(Table.GRAPH, prefix):
            for policy, number in graph_pb2.Group.FromString(value).lost_rows.items():
                counts = response.policies[policy]
                counts.finished += number
                counts.voided[VoidReason.GROUP_DROPPED.value] += number
        self._count_consumed(request, response, lost=lost)

    def _count_consumed(
        self,
        request: pb.CountVerticesRequest,
        response: pb.CountVerticesResponse,
        *,
        lost: Collection[str],
    ) -> None:
        consumed = frozenset(request.consumed_micro_batch_ids)
        records = record_key(request.run_id, request.batch, "")
        for _, value in self._database.scan(Table.META, records):
            record = graph_pb2.MicroBatch.FromString(value)
            if record.micro_batch_id in consumed:
                number = sum(ref.shard in lost for ref in record.rows)
                response.policies[record.policy].finished += number
                response.policies[record.policy].consumed += number

    def _check_shard(self, entry: RunEntry, shard: str) -> None:
        names = [known.name for known in entry.run.shards]
        if shard not in names:
            raise DomainError(
                ErrorReason.SHARD_NOT_FOUND,
                f"run {entry.run_id!r} has no store shard {shard!r}; it has: {', '.join(names)}",
                {"shard": shard},
            )
        if shard == names[0]:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"run {entry.run_id!r}: {shard!r} is its home shard; without it there is no run",
                {"shard": shard},
            )

    def _keep(self, draft: Draft, run_id: str, group: graph_pb2.Group) -> None:
        checks.check_group(group)
        if (group.status, group.drop_reason) not in _ENDS:
            raise ValueError(f"group {group.group_id!r}: what went with a shard has ended")
        key = keys.join("group", run_id, group.group_id)
        if draft.get(Table.GRAPH, key) is None:
            draft.put(Table.GRAPH, key, group.SerializeToString())
            draft.event(run_id, group_event(group))
