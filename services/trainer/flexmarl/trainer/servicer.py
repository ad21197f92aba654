"""TrainerService: parse, call the trainer, convert."""

# ruff: noqa: N802 - handlers are named as in the contract

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, TypeAlias

import grpc

from flexmarl.api.trainer.v1 import trainer_pb2 as pb
from flexmarl.api.trainer.v1 import trainer_pb2_grpc
from flexmarl.core.call_context import bind_ids
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.ticks import interval_s, ticks
from flexmarl.trainer.operations import Operations, Work
from flexmarl.trainer.trainer import Trainer

SERVICE = "flexmarl.api.trainer.v1.TrainerService"
_MAX_WAIT_S = 600.0
_WAIT_SHARE = 0.5
"""Share of its caller's time that a wait may take. On a crowded machine an answer may be seconds on
its way, and one that comes after the deadline looks like none: a minute of those, and the caller
takes a trainer at work for one that is gone."""

_Starts: TypeAlias = (
    pb.BindPolicyRequest
    | pb.ComputeGradientsRequest
    | pb.SaveGradientsRequest
    | pb.ApplyUpdateRequest
    | pb.SuspendPolicyRequest
    | pb.PrefetchPolicyRequest
)
"""Requests that start an operation."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Servicer(trainer_pb2_grpc.TrainerServiceServicer):
    """The methods of the service; NOT_READY until a trainer is there."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._operations: Operations | None = None
        self._draining = asyncio.Event()

    def open(self, trainer: Trainer, operations: Operations) -> None:
        """Serves a trainer."""
        self._trainer, self._operations = trainer, operations

    async def drain(self) -> None:
        """Ends the watches, and what is lent."""
        self._draining.set()
        if self._trainer is not None:
            self._trainer.end_loans()

    @property
    def trainer(self) -> Trainer:
        """The trainer.

        Raises:
            DomainError: NOT_READY.
        """
        if self._trainer is None:
            raise DomainError(ErrorReason.NOT_READY, "the trainer is starting its workers")
        return self._trainer

    async def OpenRun(self, request: pb.OpenRunRequest, context: Context) -> pb.OpenRunResponse:
        """See the contract."""
        return await self.trainer.open_run(request.run_id, term=request.term, shards=request.shards)

    async def CloseRun(self, request: pb.CloseRunRequest, context: Context) -> pb.CloseRunResponse:
        """See the contract."""
        await self.trainer.close_run(request.run_id, term=request.term)
        return pb.CloseRunResponse()

    async def BindPolicy(
        self, request: pb.BindPolicyRequest, context: Context
    ) -> pb.BindPolicyResponse:
        """See the contract."""
        bind_ids(run=request.run_id, policy=request.policy)
        work = partial(
            self.trainer.bind,
            request.run_id,
            request.policy,
            term=request.term,
            slots=list(request.slots),
            beyond=list(request.beyond),
            version=request.version if request.HasField("version") else None,
        )
        return pb.BindPolicyResponse(operation=self._start(request, work))

    async def ComputeGradients(
        self, request: pb.ComputeGradientsRequest, context: Context
    ) -> pb.ComputeGradientsResponse:
        """See the contract."""
        record = request.micro_batch
        bind_ids(run=request.run_id, policy=record.policy)
        binding = self.trainer.binding(request.run_id, record.policy, term=request.term)
        work = partial(
            binding.add,
            record,
            version=request.version,
            weights_hash=request.weights_hash,
            fetch=partial(self.trainer.fetch, request.run_id, record.rows),
        )
        return pb.ComputeGradientsResponse(operation=self._start(request, work))

    async def SaveGradients(
        self, request: pb.SaveGradientsRequest, context: Context
    ) -> pb.SaveGradientsResponse:
        """See the contract."""
        bind_ids(run=request.run_id, policy=request.policy)
        binding = self.trainer.binding(request.run_id, request.policy, term=request.term)
        operation = self._start(request, binding.save)
        return pb.SaveGradientsResponse(operation=operation)

    async def ApplyUpdate(
        self, request: pb.ApplyUpdateRequest, context: Context
    ) -> pb.ApplyUpdateResponse:
        """See the contract."""
        bind_ids(run=request.run_id, policy=request.policy)
        binding = self.trainer.binding(request.run_id, request.policy, term=request.term)
        work = partial(
            binding.apply,
            batch=request.batch,
            micro_batch_ids=list(request.micro_batch_ids),
        )
        return pb.ApplyUpdateResponse(operation=self._start(request, work))

    async def SuspendPolicy(
        self, request: pb.SuspendPolicyRequest, context: Context
    ) -> pb.SuspendPolicyResponse:
        """See the contract."""
        bind_ids(run=request.run_id, policy=request.policy)
        binding = self.trainer.binding(request.run_id, request.policy, term=request.term)
        operation = self._start(request, binding.suspend)
        return pb.SuspendPolicyResponse(operation=operation)

    async def PrefetchPolicy(
        self, request: pb.PrefetchPolicyRequest, context: Context
    ) -> pb.PrefetchPolicyResponse:
        """See the contract."""
        bind_ids(run=request.run_id, policy=request.policy)
        work = partial(
            self.trainer.prefetch, request.run_id, request.policy, slots=list(request.slots)
        )
        return pb.PrefetchPolicyResponse(operation=self._start(request, work))

    async def WaitOperation(
        self, request: pb.WaitOperationRequest, context: Context
    ) -> pb.WaitOperationResponse:
        """See the contract: answers well before the caller's deadline, with what is known then."""
        left_s = context.time_remaining()
        timeout_s = _MAX_WAIT_S if left_s is None else min(left_s * _WAIT_SHARE, _MAX_WAIT_S)
        operation = await self.operations.wait(request.operation_id, timeout_s=timeout_s)
        return pb.WaitOperationResponse(operation=operation)

    async def CancelOperation(
        self, request: pb.CancelOperationRequest, context: Context
    ) -> pb.CancelOperationResponse:
        """See the contract."""
        self.operations.cancel(request.operation_id)
        return pb.CancelOperationResponse()

    # The stubs know no streams that are written to the context.
    async def LendSlots(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.LendSlotsRequest], context: Context
    ) -> None:
        """See the contract; ends with the loan."""
        await self.trainer.lend(request_iterator, context.write)

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """See the contract."""
        return pb.GetStatusResponse(status=self._status())

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        """See the contract; waits for the interval, freed by the trainer's stop."""
        async for _ in ticks(interval_s(request.interval_ms), until=self._draining):
            yield pb.WatchStatusResponse(status=self._status())
        raise DomainError(ErrorReason.DRAINING, "the trainer stops")

    @property
    def operations(self) -> Operations:
        """The operations.

        Raises:
            DomainError: NOT_READY.
        """
        if self._operations is None:
            raise DomainError(ErrorReason.NOT_READY, "the trainer is starting its workers")
        return self._operations

    def _start(self, request: _Starts, work: Work) -> pb.Operation:
        return self.operations.start(request, request.request_id, work, run_id=request.run_id)

    def _status(self) -> pb.TrainerStatus:
        status = self.trainer.status()
        status.unix_ns = time.time_ns()
        return status
