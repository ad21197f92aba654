"""Slots that a policy was bound to last, and that may keep what its next ranks are to load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError
from flexmarl.runtime.logging import get_logger
from flexmarl.trainer.workers import Worker

_ANSWER_S: Final = 1.0
"""A worker that needs longer is asked in vain: reading the segments would have been faster."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepers:
    """Who is asked for each rank's part, and where the two would meet.

    Only a worker knows what it still keeps, so being asked is no promise.

    Attributes:
        workers: Workers in order of rank; None where the rank itself was there.
        meeting: Where, below whose prefix each rank has a name of its own.
    """

    workers: Sequence[Worker | None]
    meeting: rank_pb2.Handover

    async def ask(self, state: graph_pb2.StateRecord) -> dict[int, rank_pb2.Handover]:
        """Returns where the ranks meet those that keep their part, by rank."""
        asked = {rank: worker for rank, worker in enumerate(self.workers) if worker is not None}
        answers = await asyncio.gather(
            *(self._ask(worker, rank, state) for rank, worker in asked.items())
        )
        return {rank: self._of(rank) for rank, kept in zip(asked, answers, strict=True) if kept}

    async def _ask(self, worker: Worker, rank: int, state: graph_pb2.StateRecord) -> bool:
        give = rank_pb2.RankGive(
            state=rank_pb2.KeptState(
                master_key=state.master.key,
                moments_key=state.moments.key,
                members=range(len(self.workers)),
            ),
            rank=rank,
            meeting=self._of(rank),
        )
        try:
            async with asyncio.timeout(_ANSWER_S):
                reply = await worker.call(rank_pb2.RankCommand(give=give), timeout_s=60.0)
        except (DomainError, TimeoutError) as error:
            _log.info("slot_not_asked", slot=worker.slot, why=str(error))
            return False
        return reply.giving.kept

    def _of(self, rank: int) -> rank_pb2.Handover:
        meeting = rank_pb2.Handover()
        meeting.CopyFrom(self.meeting)
        meeting.prefix = f"{self.meeting.prefix}/rank{rank}"
        return meeting
