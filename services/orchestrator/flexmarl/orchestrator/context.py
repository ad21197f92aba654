"""What the parts of a driver share about its run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.api.rollout.v1 import rollout_pb2
from flexmarl.api.trainer.v1 import trainer_pb2
from flexmarl.client.run_store import RunStore
from flexmarl.core.batch_metrics import StepClock, TrainMeans
from flexmarl.core.dataset_order import DatasetOrder
from flexmarl.core.ids import BatchId, is_evaluation
from flexmarl.core.version_return import batch_attempt
from flexmarl.orchestrator.calls import fenced
from flexmarl.orchestrator.totals import Totals
from flexmarl.runtime.dataset import Queries
from flexmarl.runtime.run_config import RunConfig


@dataclass(slots=True)
class RunContext:
    """One run under one term.

    Attributes:
        run_id: Run.
        term: This orchestrator's term.
        config: The run's configuration.
        store: Its shards.
        home: Address of the home shard, as this orchestrator knows it.
        queries: Its queries, held-out ones apart.
        totals: Running sums of the process.
        returned_to: Versions that the run returned to, as later state was lost.
        manifest: Newest committed manifest; None before version 0.
        states: Newest saved state record of each policy.
        query_index: Dataset row of each group of the open batch.
        micro_batches: Records of the open batch.
        reports: Reports of versions that were committed by this process.
        rollout_status: Newest status of the dispatcher.
        trainer_status: Newest status of each trainer.
        clock: Moments of the present step.
        train_means: Numbers that trainers reported in the present step.
    """

    run_id: str
    term: int
    config: RunConfig
    store: RunStore
    home: common_pb2.ShardAddress
    queries: Queries
    totals: Totals
    returned_to: tuple[int, ...] = ()
    manifest: graph_pb2.Manifest | None = None
    states: dict[str, graph_pb2.StateRecord] = field(default_factory=dict)
    query_index: dict[str, int] = field(default_factory=dict)
    micro_batches: dict[str, graph_pb2.MicroBatch] = field(default_factory=dict)
    reports: list[orchestrator_pb2.VersionReport] = field(default_factory=list)
    rollout_status: rollout_pb2.RolloutStatus | None = None
    trainer_status: dict[str, trainer_pb2.TrainerStatus] = field(default_factory=dict)
    clock: StepClock = field(default_factory=lambda: StepClock(begun=time.monotonic()))
    train_means: TrainMeans = field(default_factory=TrainMeans)

    def batch_id(self, batch: int) -> BatchId:
        """A batch, under the attempt that it is in."""
        return BatchId(batch, batch_attempt(self.returned_to, batch))

    @property
    def shards(self) -> Sequence[common_pb2.ShardAddress]:
        """The run's store shards, for the other services."""
        return self.store.addresses

    @property
    def order(self) -> DatasetOrder:
        """Order of the dataset."""
        dataset = self.config.dataset
        return DatasetOrder(
            len(self.queries.training),
            seed=self.config.seed,
            shuffle=dataset.shuffle,
            epochs=dataset.epochs,
        )

    def query_of(self, group_id: str) -> bytes:
        """The query of an admitted group."""
        return self.query_at(group_id, self.query_index[group_id])

    def query_at(self, group_id: str, index: int) -> bytes:
        """The query of a group that is to have that row."""
        rows = self.queries.held_out if is_evaluation(group_id) else self.queries.training
        return rows[index]

    async def confirm_term(self) -> None:
        """Make sure that nobody has taken the run over, where no other call would tell.

        Raises:
            TakenOverError: A newer term exists.
        """
        with fenced():
            await self.store.update_run_status(
                self.run_id, common_pb2.RUN_STATUS_RUNNING, term=self.term
            )

    def save_seen(self, state: graph_pb2.StateRecord) -> None:
        """Remember a policy's newest state."""
        self.states[state.policy] = state
