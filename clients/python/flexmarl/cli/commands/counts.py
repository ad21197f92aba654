"""`flexmarl counts`: the account of stored vertices, counted anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.connect import with_run
from flexmarl.cli.output import print_json, print_line, print_table
from flexmarl.client.store import StoreClient

_COLUMNS: Final = (
    "batch", "policy", "finished", "consumed", "void", "untrained", "cancelled", "unaccounted",
    "balances",
)  # fmt: skip


def counts(
    run_id: str, *, batch: int | None, data_dir: Path, cluster: Sequence[str], as_json: bool
) -> int:
    """Count the vertices of committed batches; returns the exit code.

    Raises:
        DomainError: No such run.
    """

    async def read(
        store: StoreClient, _folder: ClusterFolder, _run: graph_pb2.Run
    ) -> list[dict[str, Any]]:
        manifests = await store.list_manifests(run_id)
        records = [manifest.batch for manifest in manifests if manifest.HasField("batch")]
        chosen = [record for record in records if batch in (None, record.batch)]
        return [row for record in chosen for row in await _count(store, run_id, record)]

    rows = with_run(read, run_id, data_dir=data_dir, cluster=cluster)
    if as_json:
        print_json(rows)
    elif rows:
        print_table(rows, _COLUMNS)
    else:
        print_line("no such batch is committed")
    return 0 if all(row["balances"] for row in rows) else 1


async def _count(
    store: StoreClient, run_id: str, record: graph_pb2.BatchRecord
) -> list[dict[str, Any]]:
    answer = await store.count_vertices(
        run_id,
        batch=record.batch,
        batch_attempt=record.batch_attempt,
        consumed=record.consumed_micro_batch_ids,
    )
    return [_row(record.batch, policy, found) for policy, found in sorted(answer.policies.items())]


def _row(batch: int, policy: str, found: graph_pb2.PolicyCounts) -> dict[str, Any]:
    void = sum(found.voided.values())
    unaccounted = found.finished - found.consumed - void - found.untrained
    return {
        "batch": batch,
        "policy": policy or None,
        "finished": found.finished,
        "consumed": found.consumed,
        "void": void,
        "void_by_reason": dict(found.voided),
        "untrained": found.untrained,
        "cancelled": found.cancelled,
        "unaccounted": unaccounted,
        "balances": unaccounted == 0,
    }
