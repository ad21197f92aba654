"""The ranks of one binding as one: they do a command together, or the group is ended.

Ranks after the first `num_near` are on slots that other trainers lend; they are told the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from flexmarl.api.trainer.v1 import rank_pb2, trainer_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.process_groups import SECOND_HAND
from flexmarl.trainer.workers import Worker

_REFUSAL_GRACE_S: Final = 5.0
"""How long the other ranks may take to answer once one has failed."""


class Rank(Protocol):
    """A worker of a slot here, or of one that is lent."""

    @property
    def slot(self) -> str:
        """Its slot."""
        ...

    @property
    def position(self) -> int:
        """Its number among this trainer's workers."""
        ...

    @property
    def pid(self) -> int:
        """Its process."""
        ...

    async def call(self, command: rank_pb2.RankCommand, *, timeout_s: float) -> rank_pb2.RankReply:
        """See `Worker.call`."""
        ...

    def kill(self) -> None:
        """See `Worker.kill`."""
        ...

    def replace(self) -> None:
        """See `Worker.replace`."""
        ...


class RankGroup:
    """Workers in order of rank.

    Args:
        workers: The workers of this trainer; at least one.
        lent: Those of other trainers, after them.
        command_timeout_s: Longest work of a rank on one command.
    """

    def __init__(
        self, workers: Sequence[Worker], lent: Sequence[Rank] = (), *, command_timeout_s: float
    ) -> None:
        self.num_near = len(workers)
        self.workers: tuple[Rank, ...] = (*workers, *lent)
        self._timeout_s = command_timeout_s
        self._at_work: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def members(self) -> tuple[int, ...]:
        """The workers' numbers in this trainer."""
        return tuple(worker.position for worker in self.workers)

    def replace(self) -> None:
        """Ends the workers; each slot gets a fresh one."""
        for worker in self.workers:
            worker.replace()

    def end_work(self) -> None:
        """Ends the workers that are at work for this group; each slot gets a fresh one."""
        for worker in self.workers:
            if self._at_work[worker.slot]:
                worker.kill()

    async def prefetch(
        self, segments: Sequence[rank_pb2.MappedSegment]
    ) -> trainer_pb2.PrefetchResult:
        """Loads saved master and moments beside what the workers do.

        Raises:
            DomainError: A worker failed; its work goes on.
        """
        keys = {segment.kind: segment.key for segment in segments}
        state = rank_pb2.KeptState(
            master_key=keys["master"], moments_key=keys["moments"], members=self.members
        )
        commands = [
            rank_pb2.RankCommand(
                prefetch=rank_pb2.RankPrefetch(rank=rank, state=state, segments=segments)
            )
            for rank in range(len(self.workers))
        ]
        # Workers do not wait for each other here, so one that fails is no reason to end others;
        # but the caller's leases are held until the last one has read.
        calls = (
            self._call(worker, command)
            for worker, command in zip(self.workers, commands, strict=True)
        )
        replies: list[rank_pb2.RankReply] = []
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            replies.append(outcome)
        return trainer_pb2.PrefetchResult(
            loaded_bytes=sum(reply.prefetched.loaded_bytes for reply in replies),
            seconds=max(reply.prefetched.seconds for reply in replies),
        )

    async def command(self, command: rank_pb2.RankCommand) -> list[rank_pb2.RankReply]:
        """Sends one command to every rank; see `each`."""
        if len(self.workers) == 1:
            return [await self._call(self.workers[0], command)]
        return await self.each([_copy(command) for _ in self.workers])

    async def each(self, commands: Sequence[rank_pb2.RankCommand]) -> list[rank_pb2.RankReply]:
        """Sends each rank its command and waits for all of them.

        Ranks wait for each other in collectives, so when one fails the others are ended, too.

        Raises:
            DomainError: What failed first; CHILD_DIED with the ranks that others waited for in
                vain.
        """
        tasks = [
            asyncio.ensure_future(self._call(worker, command))
            for worker, command in zip(self.workers, commands, strict=True)
        ]
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                # A refusal is the same on all ranks; give them the time to say so.
                _, pending = await asyncio.wait(pending, timeout=_REFUSAL_GRACE_S)
            silent = [self.workers[tasks.index(task)] for task in pending]
            if pending:
                for worker in self.workers:
                    worker.kill()
            hung = [f"{worker.slot} (pid {worker.pid})" for worker in silent]
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()  # those that are left when this wait itself is cancelled
        errors = [error for task in (*done, *tasks) if (error := task.exception()) is not None]
        if errors:
            raise _cause(errors, hung)
        return [task.result() for task in tasks]

    async def _call(self, worker: Rank, command: rank_pb2.RankCommand) -> rank_pb2.RankReply:
        self._at_work[worker.slot] += 1
        try:
            return await worker.call(command, timeout_s=self._timeout_s)
        finally:
            self._at_work[worker.slot] -= 1


def _cause(errors: Sequence[BaseException], hung: Sequence[str]) -> BaseException:
    """What failed first is the cause: the others may have failed for want of it.

    But a rank that has only heard of a failure, or waited for others in vain, is never the cause;
    the error is the one that it heard of, names those that it waited for, or is what became of
    them.
    """
    errors = [error for error in errors if not _is_second_hand(error)] or errors
    if not _waited(errors[0]):
        return errors[0]
    if hung:
        names = ", ".join(hung)
        return DomainError(
            ErrorReason.CHILD_DIED,
            f"{names} did not arrive in a collective in time; the group was ended",
            {"ranks": names},
        )
    return next((error for error in errors if not _waited(error)), errors[0])


def _is_second_hand(error: BaseException) -> bool:
    return isinstance(error, DomainError) and SECOND_HAND in error.metadata


def _waited(error: BaseException) -> bool:
    return isinstance(error, DomainError) and error.reason is ErrorReason.DEADLINE_EXCEEDED


def _copy(command: rank_pb2.RankCommand) -> rank_pb2.RankCommand:
    copy = rank_pb2.RankCommand()
    copy.CopyFrom(command)
    return copy
