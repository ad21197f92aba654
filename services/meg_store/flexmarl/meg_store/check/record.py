"""What is stored of a run's training, read once for all checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.check.opened import OpenStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """What the home shard keeps of one run's training.

    Attributes:
        micro_batches: Records by id.
        states: State records.
        manifests: Manifests, oldest first.
    """

    micro_batches: Mapping[str, graph_pb2.MicroBatch] = field(default_factory=dict)
    states: list[graph_pb2.StateRecord] = field(default_factory=list)
    manifests: list[graph_pb2.Manifest] = field(default_factory=list)

    @classmethod
    def read(cls, home: OpenStore, run_id: str) -> TrainingRecord:
        """Read it all."""

        def values(stem: str, kind: str, decode: Callable[[bytes], T]) -> list[T]:
            where = f"{run_id} {kind}"
            read = (
                home.report.read(kind, where, decode, value)
                for _, value in home.scan(Table.META, stem, run_id)
            )
            return [value for value in read if value is not None]

        records = values("micro_batch", "record", graph_pb2.MicroBatch.FromString)
        return cls(
            {record.micro_batch_id: record for record in records},
            values("state", "ledger", graph_pb2.StateRecord.FromString),
            values("manifest", "manifest", graph_pb2.Manifest.FromString),
        )

    def consumed(self) -> dict[tuple[int, int], frozenset[str]]:
        """Consumed micro-batches of each committed batch attempt."""
        batches = [manifest.batch for manifest in self.manifests if manifest.HasField("batch")]
        return {(b.batch, b.batch_attempt): frozenset(b.consumed_micro_batch_ids) for b in batches}
