"""Slots that this trainer lends to one that leads a group over several.

    leading trainer --commands--> Loan --frames--> workers
                    <--replies---

A loan lasts as long as its stream. It ends when the leader gives the slots back, is silent or gone;
when a worker dies; when the policy is bound anew here, or its run closed. In each case the slots
are free before the stream ends. A worker that is at work then is ended, for it may wait in a
collective for ranks that are gone; any other one drops what it holds when it is bound next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.trainer.v1 import rank_pb2, trainer_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.process_groups import check_part, numbers_of_members
from flexmarl.core.trainer_slots import Claim
from flexmarl.runtime.aio import Background
from flexmarl.runtime.spans import SpanRecorder
from flexmarl.trainer.talk import FRAME_FORMAT, Outbox, heard
from flexmarl.trainer.workers import Worker

_ACTIVITIES: Final = {"export": "save", "unbind": "suspend"}
"""Names of commands as operations, where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoanParts:
    """What a loan is made of.

    Attributes:
        claim: Policy, term and slots.
        first_rank: Rank of the first slot in the group.
        world_size: Ranks of the group.
        model_path: Folder of the policy's base model on this node.
        package_path: Folder of the run's workflow package on this node, or "".
        workers: Workers of the slots, in order of rank.
        kept_groups: Groups that the workers keep for this trainer's own bindings.
        warm_timeout_s: Longest wait for a worker.
        command_timeout_s: Longest work on one command.
        silence_s: Longest silence of the leader.
        cold_start: Replace the workers at the end.
        spans: Timeline.
        background: Owns the listener, and the work of ranks.
        on_lost: Gives the claim back.
    """

    claim: Claim
    first_rank: int
    world_size: int
    model_path: str
    package_path: str
    workers: Sequence[Worker]
    kept_groups: Callable[[], Sequence[str]]
    warm_timeout_s: float
    command_timeout_s: float
    silence_s: float
    cold_start: bool
    spans: SpanRecorder
    background: Background
    on_lost: Callable[[Claim], None]


class Loan:
    """See the module's text."""

    def __init__(self, parts: LoanParts) -> None:
        self._parts = parts
        self._outbox = Outbox(
            trainer_pb2.LendSlotsResponse(beat=trainer_pb2.Beat()), silence_s=parts.silence_s
        )
        self._at_work: dict[int, asyncio.Task[None]] = {}
        self._members = numbers_of_members(
            [worker.position for worker in parts.workers],
            first_rank=parts.first_rank,
            world_size=parts.world_size,
        )
        self.lost = False
        self.activity = ""
        self.state_bytes = 0

    @property
    def claim(self) -> Claim:
        """Policy, term and slots."""
        return self._parts.claim

    async def serve(
        self,
        requests: AsyncIterator[trainer_pb2.LendSlotsRequest],
        say: Callable[[trainer_pb2.LendSlotsResponse], Awaitable[None]],
    ) -> None:
        """Carries the stream to its end.

        Raises:
            DomainError: What ended it, but for the leader giving the slots back.
        """
        listening = self._parts.background.start(
            f"loan of {self.claim.key}", self._listen(requests)
        )
        try:
            async for response in self._outbox.messages():
                await say(response)
        finally:
            self.lose()
            listening.cancel()
            await asyncio.wait([listening])

    def lose(self, error: DomainError | None = None) -> None:
        """Ends the loan: the slots are free from now on."""
        if self.lost:
            return
        self.lost = True
        self._parts.on_lost(self.claim)
        for index, worker in enumerate(self._parts.workers):
            task = self._at_work.get(index)
            if task is not None:
                task.cancel()
                worker.kill()
            elif self._parts.cold_start:
                worker.replace()
        self._outbox.end(error or _ended(self.claim))

    async def _listen(self, requests: AsyncIterator[trainer_pb2.LendSlotsRequest]) -> None:
        """Waits for the leader's next word, freed by it, its silence, or the end of the stream."""
        parts = self._parts
        who = f"the trainer that leads {self.claim.key}"
        try:
            for worker in parts.workers:
                await worker.wait_ready(timeout_s=parts.warm_timeout_s)
            lent = trainer_pb2.Lent(pids=[worker.pid for worker in parts.workers])
            self._outbox.put(trainer_pb2.LendSlotsResponse(lent=lent))
            with suppress(StopAsyncIteration):
                while True:
                    self._take(await heard(requests.__anext__, silence_s=parts.silence_s, who=who))
        except DomainError as error:
            self.lose(error)
        else:
            self._outbox.end()

    def _take(self, request: trainer_pb2.LendSlotsRequest) -> None:
        match request.WhichOneof("message"):
            case "command":
                index = self._index(request.command.index)
                if index in self._at_work:
                    raise _misused(f"rank {index} has a command already")
                command = self._localised(_parsed(request.command.frame))
                self._at_work[index] = self._parts.background.start(
                    f"{self.claim.key} on lent slot {index}", self._work(index, command)
                )
            case "end_worker":
                self._parts.workers[self._index(request.end_worker)].kill()
            case "beat":
                pass
            case other:
                raise _misused(f"{other} is not expected now")

    async def _work(self, index: int, command: rank_pb2.RankCommand) -> None:
        kind = command.WhichOneof("command") or ""
        self.activity, began = _ACTIVITIES.get(kind, kind), time.time()
        number = command.command_id
        try:
            reply = await self._parts.workers[index].call(
                command, timeout_s=self._parts.command_timeout_s
            )
        except DomainError as error:
            reply = rank_pb2.RankReply(
                failure=common_pb2.Failure(
                    reason=error.reason, message=error.message, metadata=dict(error.metadata)
                )
            )
        finally:
            self._at_work.pop(index, None)
            self._record(index, began)
        if reply.HasField("bound"):
            self.state_bytes = reply.bound.state_bytes
        reply.command_id = number
        frame = trainer_pb2.RankFrame(index=index, frame=reply.SerializeToString())
        self._outbox.put(trainer_pb2.LendSlotsResponse(reply=frame))

    def _localised(self, command: rank_pb2.RankCommand) -> rank_pb2.RankCommand:
        """Puts in what only this trainer knows: its folders, its workers, the groups they keep."""
        if command.WhichOneof("command") == "bind":
            bind = command.bind
            bind.model_path = self._parts.model_path
            bind.package_path = self._parts.package_path
            bind.members[:] = self._members
            bind.kept_groups[:] = [*self._parts.kept_groups(), bind.group_prefix]
        return command

    def _record(self, index: int, began: float) -> None:
        activity = self.activity
        if not self._at_work:
            self.activity = ""
        key = self.claim.key
        self._parts.spans.add(
            f"slot/{self.claim.slots[index]}",
            f"{key.policy} {activity}",
            began,
            time.time(),
            policy=key.policy,
            run=key.run_id,
        )

    def _index(self, index: int) -> int:
        if index >= len(self._parts.workers):
            raise _misused(f"{len(self._parts.workers)} slot(s) are lent, there is no {index}")
        return index


async def first_word(
    requests: AsyncIterator[trainer_pb2.LendSlotsRequest], *, silence_s: float
) -> trainer_pb2.Borrow:
    """Waits for what the leading trainer asks for.

    Raises:
        DomainError: INVALID_ARGUMENT when it is something else, of another build, or no part of a
            group.
    """
    with suppress(StopAsyncIteration):
        first = await heard(requests.__anext__, silence_s=silence_s, who="the leading trainer")
        if first.WhichOneof("message") == "borrow":
            if first.borrow.frame_format != FRAME_FORMAT:
                raise _misused("the trainers are of different builds; run the same on all nodes")
            check_part(
                first_rank=first.borrow.first_rank,
                num_slots=len(first.borrow.slots),
                world_size=first.borrow.world_size,
            )
            return first.borrow
    raise _misused("the first message says which slots")


def _parsed(frame: bytes) -> rank_pb2.RankCommand:
    try:
        return rank_pb2.RankCommand.FromString(frame)
    except DecodeError as error:
        raise _misused("a frame is no command to a rank") from error


def _misused(what: str) -> DomainError:
    return DomainError(ErrorReason.INVALID_ARGUMENT, f"LendSlots: {what}")


def _ended(claim: Claim) -> DomainError:
    return DomainError(
        ErrorReason.TERM_STALE,
        f"{claim.key} has its slots here under term {claim.term} no longer",
        {"policy": claim.key.policy, "term": str(claim.term)},
    )
