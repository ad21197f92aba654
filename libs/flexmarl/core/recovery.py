"""Taking a run up again from what the store holds.

Nothing here is special: stored facts are put where the events of an unbroken run would have put
them, and the ordinary rules find what is due.

- Groups that are closed keep their released rows; those in no record form micro-batches.
- Groups that are open, with all samples ended, are decided again; the same facts, the same end.
- Records are in a sum when the newest saved ledger says so; others are handed out again.
- Groups that went with a store shard come again as long as a policy can learn from them. Its rows
  of policies whose update was made by then are void: an update is never made twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flexmarl.core.batch import BatchGroups
from flexmarl.core.chains import folded
from flexmarl.core.run_events import StateFact, StoredRun
from flexmarl.core.training import Training
from flexmarl.core.training_rows import Row


def restore_batch(stored: StoredRun, batch: BatchGroups | None, training: Training) -> None:
    """Puts stored facts into the open batch and the policies.

    Args:
        stored: What the store holds.
        batch: The open batch, just made; None when there is none.
        training: Policies; their batch has begun where there is one.
    """
    if stored.version is not None:
        for policy in training.policies.values():
            policy.has_state = True
    if batch is not None and stored.groups:
        updated = {name for name, state in stored.states.items() if state.has_updated(batch.number)}
        batch.restore(stored.groups, stored.samples, updated=updated)
        _restore_records(stored, training)
    for name, state in sorted(stored.states.items()):
        if name in training.policies:
            training.policies[name].adopt(state)


def comes_again(trained: Iterable[str], states: Mapping[str, StateFact], *, batch: int) -> bool:
    """Whether the queries of groups that went with a store shard come again.

    Args:
        trained: The trained policies.
        states: Newest state of each policy that has one.
        batch: The open batch.
    """
    return not all(name in states and states[name].has_updated(batch) for name in trained)


def _restore_records(stored: StoredRun, training: Training) -> None:
    rows: dict[str, Row] = {row.vertex_id: row for item in stored.groups for row in item.rows}
    taken: set[str] = set()
    for record in sorted(stored.records, key=lambda record: record.micro_batch_id):
        taken.update(record.vertex_ids)
        training.policies[record.policy].restore(
            record.micro_batch_id,
            # Rows that went with a lost store shard are known by their record alone.
            tuple(folded(rows[name] for name in record.vertex_ids if name in rows)),
            voided=record.voided,
        )
    for item in stored.groups:
        free = (r for r in item.rows if r.vertex_id in item.claimable and r.vertex_id not in taken)
        for row in folded(free):
            training.policies[row.policy].queue.add((row,), group_ordinal=item.spec.ordinal)
