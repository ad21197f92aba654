"""The ranks of one binding as one: they do a command together, or the group is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from flexmarl.api.trainer.v1alpha1 import rank_pb2
from flexmarl.trainer.workers import Worker

_REFUSAL_GRACE_S: Final = 5.0
"""How long the other ranks may take to answer once one has failed."""


class RankGroup:
    """Workers in order of rank.

    Args:
        workers: The workers; at least one.
        command_timeout_s: Longest work of a rank on one command.
    """

    def __init__(self, workers: Sequence[Worker], *, command_timeout_s: float) -> None:
        self.workers = tuple(workers)
        self._timeout_s = command_timeout_s

    def __len__(self) -> int:
        return len(self.workers)

    def holds(self, *, master: str, moments: str) -> bool:
        """Whether every rank's weights and moments equal these segments."""
        return all(worker.resident == (master, moments) for worker in self.workers)

    def set_held(self, held: tuple[str, str] | None) -> None:
        """Notes the segments of master and moments that the ranks equal; None before a change."""
        for worker in self.workers:
            worker.resident = held

    async def command(self, command: rank_pb2.RankCommand) -> list[rank_pb2.RankReply]:
        """Sends one command to every rank; see `each`."""
        if len(self.workers) == 1:
            return [await self.workers[0].call(command, timeout_s=self._timeout_s)]
        return await self.each([_copy(command) for _ in self.workers])

    async def each(self, commands: Sequence[rank_pb2.RankCommand]) -> list[rank_pb2.RankReply]:
        """Sends each rank its command and waits for all of them.

        Ranks wait for each other in collectives, so when one fails the others are ended, too.

        Raises:
            DomainError: What failed first.
        """
        tasks = [
            asyncio.ensure_future(worker.call(command, timeout_s=self._timeout_s))
            for worker, command in zip(self.workers, commands, strict=True)
        ]
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                # A refusal is the same on all ranks; give them the time to say so.
                _, pending = await asyncio.wait(pending, timeout=_REFUSAL_GRACE_S)
            if pending:
                for worker in self.workers:
                    worker.kill()
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()  # those that are left when this wait itself is cancelled
        # What failed first is the cause; the others may have failed for want of it.
        for task in (*done, *tasks):
            error = task.exception()
            if error is not None:
                raise error
        return [task.result() for task in tasks]


def _copy(command: rank_pb2.RankCommand) -> rank_pb2.RankCommand:
    copy = rank_pb2.RankCommand()
    copy.CopyFrom(command)
    return copy
