"""The end of a batch: nothing may be left over before the commit (I9).

    dropped micro-batches' rows void -> count -> leftovers void -> count again -> commit

Rows are left over when a late write came after its group had ended; the subgraphs are closed by
now, so no further ones can come and two rounds are enough unless something is broken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flexmarl.core.batch import BatchGroups
from flexmarl.core.dataset_order import Cursor
from flexmarl.core.idle import IdleWatch
from flexmarl.core.policy_training import Record, RecordStage
from flexmarl.core.run_effects import Commit, CountVertices, VoidRows
from flexmarl.core.states import VoidReason
from flexmarl.core.training import Training
from flexmarl.core.training_rows import Row, RowVoid, RunFailure

MAX_COUNTS = 4
"""Rounds of counting and voiding before a batch that does not add up fails the run."""


class BatchEnd:
    """Steps from "all is trained" to the commit, one at a time.

    Args:
        batch: The batch.
        training: Its policies.
        idle: Ends a run that trains nothing.
    """

    def __init__(self, batch: BatchGroups, training: Training, idle: IdleWatch) -> None:
        self.busy = False
        self.failure: RunFailure | None = None
        self._batch = batch
        self._training = training
        self._idle = idle
        self._leftovers: tuple[Row, ...] = ()
        self._counts = 0
        self._proven = False

    def due(self, *, version: int, cursor: Cursor) -> Iterator[VoidRows | CountVertices | Commit]:
        """The next step, if the batch is ready for it and none is under way."""
        batch = self._batch
        if self.busy or not batch.all_terminal or not self._training.settled:
            return
        self.busy = True
        number = batch.batch.batch
        non_finite = [
            v for record in self._non_finite() for row in record.rows for v in row.vertices
        ]
        if non_finite:
            # From here on they must not come into a sum, even if their trainer is lost meanwhile.
            for record in self._non_finite():
                record.voided = True
            voided = tuple(RowVoid(row, VoidReason.NON_FINITE) for row in non_finite)
            yield VoidRows(batch=number, rows=voided, reason="their gradients are not finite")
        elif self._leftovers:
            voided = tuple(RowVoid(row, batch.leftover_reason(row)) for row in self._leftovers)
            yield VoidRows(batch=number, rows=voided, reason="they came after their groups ended")
        elif not self._proven:
            yield CountVertices(
                batch=number, consumed=self._training.consumed, reason="finished = consumed + void"
            )
        else:
            yield Commit(
                version=version + 1,
                expected_version=version,
                stepped=self._training.stepped,
                cursor=cursor,
                reason=f"batch {number} is complete",
            )

    def voided(self) -> None:
        """The store has voided the rows."""
        self.busy = False
        self._leftovers = ()

    def counted(self, open_rows: tuple[Row, ...], voided: Mapping[VoidReason, int]) -> None:
        """The store has counted."""
        self.busy = False
        self._counts += 1
        self._leftovers = open_rows
        self._proven = not open_rows
        if self._proven:
            self.failure = self._idle.judge(
                self._batch.number,
                trained=bool(self._training.consumed),
                voided=voided,
                sample_failure=self._batch.sample_failure,
            )
        if open_rows and self._counts >= MAX_COUNTS:
            self.failure = RunFailure(
                reason="INTERNAL",
                message=(
                    f"batch {self._batch.batch.batch} does not add up: {len(open_rows)} row(s) are "
                    f"neither consumed nor void, the first is {open_rows[0].vertex_id}"
                ),
            )

    def _non_finite(self) -> list[Record]:
        return [
            record
            for policy in self._training.trained
            for record in policy.records.values()
            if record.stage is RecordStage.DROPPED and not record.voided
        ]
