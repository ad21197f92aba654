"""Slots of other trainers that a group led by this one works on.

What a `LentRank` is told goes to the lending trainer, over one stream per binding and trainer, and
from there to the worker. The stream is the loan (`flexmarl.trainer.lending`): when it breaks, what
was in progress fails with CHILD_DIED, as if the worker had died, and the binding is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import grpc

from flexmarl.api.trainer.v1 import rank_pb2, trainer_pb2
from flexmarl.client.channel import StreamCall
from flexmarl.client.trainer import TrainerClient
from flexmarl.core.errors import DomainError, ErrorFamily, ErrorReason
from flexmarl.core.process_groups import NUMBERS_OF_OTHERS
from flexmarl.runtime.aio import Background
from flexmarl.trainer.talk import Outbox, heard
from flexmarl.trainer.workers import unpacked

_NOT_THERE: Final = (ErrorFamily.UNAVAILABLE, ErrorFamily.DEADLINE, ErrorFamily.CANCELLED)
"""Families of failures that say nothing about what was asked."""


class Borrowed:
    """The slots of one other trainer, from `open` on until they are given back or lost.

    Args:
        client: Of the trainer.
        borrow: Which slots, and for what.
        ready_s: Longest wait until they are lent.
        silence_s: Longest silence of the trainer.
        background: Owns the listener.
    """

    def __init__(
        self,
        client: TrainerClient,
        borrow: trainer_pb2.Borrow,
        *,
        ready_s: float,
        silence_s: float,
        background: Background,
    ) -> None:
        self._client = client
        self._borrow = borrow
        self._ready_s = ready_s
        self._silence_s = silence_s
        self._background = background
        self._outbox = Outbox(
            trainer_pb2.LendSlotsRequest(beat=trainer_pb2.Beat()), silence_s=silence_s
        )
        self._call: StreamCall | None = None
        self._listening: asyncio.Task[None] | None = None
        self._replies: dict[int, asyncio.Future[rank_pb2.RankReply]] = {}
        self._on_lost: Callable[[], None] | None = None
        self._error: DomainError | None = None
        self.ranks = tuple(
            LentRank(self, index, f"{slot} of {client.address}", rank=borrow.first_rank + index)
            for index, slot in enumerate(borrow.slots)
        )

    async def open(self, *, on_lost: Callable[[], None]) -> None:
        """Waits until the slots are lent.

        Args:
            on_lost: Called once when they are lost afterwards.

        Raises:
            DomainError: NOT_READY when the trainer does not answer; what it refuses with.
        """
        self._outbox.put(trainer_pb2.LendSlotsRequest(borrow=self._borrow))
        self._call = self._client.lend_slots(self._outbox.messages())
        try:
            async with asyncio.timeout(self._ready_s):
                while not (response := await self._next()).HasField("lent"):
                    pass
        except TimeoutError:
            self.drop()
            raise self._not_lent(f"not within {self._ready_s:g} s") from None
        except DomainError as error:
            self.drop()
            if error.reason is ErrorReason.CHILD_DIED or error.reason.family in _NOT_THERE:
                raise self._not_lent(error.message) from error
            raise
        for rank, pid in zip(self.ranks, response.lent.pids, strict=True):
            rank.pid = pid
        self._on_lost = on_lost
        self._listening = self._background.start(
            f"slots borrowed of {self._client.address}", self._listen()
        )

    def say(self, request: trainer_pb2.LendSlotsRequest) -> None:
        """Says something to the trainer."""
        self._outbox.put(request)

    def expect(self, index: int) -> asyncio.Future[rank_pb2.RankReply]:
        """The reply that a rank will give.

        Raises:
            DomainError: The slots are lost.
        """
        if self._error is not None:
            raise self._error
        assert index not in self._replies, "a rank works on one command at a time"
        reply: asyncio.Future[rank_pb2.RankReply] = asyncio.get_running_loop().create_future()
        self._replies[index] = reply
        reply.add_done_callback(lambda _: self._replies.pop(index, None))
        return reply

    async def give_back(self) -> None:
        """Gives the slots back; waits until they are free there, freed by silence at the latest."""
        self._on_lost = None
        self._outbox.end()
        if self._listening is not None:
            await asyncio.wait([self._listening], timeout=self._silence_s)
        self.drop()

    def drop(self) -> None:
        """Lets go without a word; who waits for a rank has waited in vain."""
        self._on_lost = None
        self._end(
            DomainError(ErrorReason.DEADLINE_EXCEEDED, "the group was ended for want of others")
        )

    async def _listen(self) -> None:
        """Waits for the trainer's next word, freed by it, its silence, or the end of the stream."""
        try:
            while True:
                response = await self._next()
                if response.HasField("reply"):
                    future = self._replies.get(response.reply.index)
                    if future is not None and not future.done():
                        future.set_result(rank_pb2.RankReply.FromString(response.reply.frame))
        except DomainError as error:
            self._end(
                DomainError(
                    ErrorReason.CHILD_DIED,
                    f"{', '.join(rank.slot for rank in self.ranks)}: {error.message}",
                    {"trainer": self._client.address},
                )
            )

    async def _next(self) -> trainer_pb2.LendSlotsResponse:
        assert self._call is not None, "it is open"
        who = f"the trainer at {self._client.address}"
        try:
            response = await heard(self._call.read, silence_s=self._silence_s, who=who)
        except asyncio.CancelledError:
            if self._error is None:
                raise
            raise self._error from None  # gRPC says so to who reads a call that was dropped here
        if response is grpc.aio.EOF:
            raise DomainError(ErrorReason.CHILD_DIED, "the trainer has them back")
        assert isinstance(response, trainer_pb2.LendSlotsResponse), "the contract says so"
        return response

    def _end(self, error: DomainError) -> None:
        if self._error is None:
            self._error = error
            self._outbox.end()
            if self._call is not None:
                self._call.cancel()
        for reply in [*self._replies.values()]:
            if not reply.done():
                reply.set_exception(self._error)
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost()

    def _not_lent(self, why: str) -> DomainError:
        address, slots = self._client.address, ", ".join(self._borrow.slots)
        return DomainError(
            ErrorReason.NOT_READY,
            f"the trainer at {address} did not lend {slots} to {self._borrow.policy}: {why}",
            {"trainer": address},
        )


class LentRank:
    """A worker of another trainer, told what to do as an own one is.

    Attributes:
        slot: Slot and trainer, for messages.
        position: Its number among this trainer's workers.
        pid: Its process there; 0 before it is lent.
    """

    def __init__(self, borrowed: Borrowed, index: int, slot: str, *, rank: int) -> None:
        self._borrowed = borrowed
        self._index = index
        self.slot = slot
        self.position = NUMBERS_OF_OTHERS + rank
        self.pid = 0

    async def call(self, command: rank_pb2.RankCommand, *, timeout_s: float) -> rank_pb2.RankReply:
        """Sends a command and waits for its reply; see `Worker.call`.

        Raises:
            DomainError: CHILD_DIED, DEADLINE_EXCEEDED, or the failure that the worker reported.
        """
        reply = self._borrowed.expect(self._index)
        frame = trainer_pb2.RankFrame(index=self._index, frame=command.SerializeToString())
        self._borrowed.say(trainer_pb2.LendSlotsRequest(command=frame))
        try:
            async with asyncio.timeout(timeout_s):
                return unpacked(await reply)
        except TimeoutError:
            self.kill()
            raise DomainError(
                ErrorReason.DEADLINE_EXCEEDED,
                f"slot {self.slot} (pid {self.pid}) did not finish "
                f"{command.WhichOneof('command')} within {timeout_s:g} s and was ended",
                {"slot": self.slot, "pid": str(self.pid)},
            ) from None

    def kill(self) -> None:
        """Has the worker ended; a trainer that does not hear it is found silent."""
        self._borrowed.say(trainer_pb2.LendSlotsRequest(end_worker=self._index))

    def replace(self) -> None:
        """Nothing: its trainer gives the slot a fresh worker if it is to have one."""
