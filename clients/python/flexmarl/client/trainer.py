"""The trainer's typed client: operations are started, waited for in bounded steps, and unpacked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.meg_store.v1alpha1 import graph_pb2
from flexmarl.api.trainer.v1alpha1 import trainer_pb2 as pb
from flexmarl.api.trainer.v1alpha1.trainer_pb2_grpc import TrainerServiceStub
from flexmarl.client.channel import Channel, connect
from flexmarl.client.errors import make_error
from flexmarl.client.request import new_request_id
from flexmarl.core.errors import ErrorReason, find_reason

WAIT_STEP_S = 30.0
"""Deadline of one WaitOperation call."""

OPERATION_TIMEOUT_S = 3600.0
"""Longest wait for an operation unless the caller says otherwise."""


class TrainerClient:
    """Client of one trainer.

    Methods that work on a policy start an operation and return its result when it ends. A request
    id is made once per call, so a call that is repeated inside finds its operation again. When the
    trainer died in between, its successor does not know the operation: NOT_FOUND is raised, and the
    policy is not bound there any more.

    Args:
        channel: From `connect`.
        owns_channel: Close the channel with the client.
    """

    def __init__(self, channel: Channel, *, owns_channel: bool = False) -> None:
        self.address = channel.address
        self._channel = channel
        self._stub: Any = TrainerServiceStub(channel)
        self._owns_channel = owns_channel

    @classmethod
    def connect(cls, address: str) -> Self:
        """Client of the trainer at `host:port`; it connects on the first call."""
        return cls(connect(address), owns_channel=True)

    async def close(self) -> None:
        """Close the connection."""
        if self._owns_channel:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def open_run(
        self, run_id: str, *, term: int, shards: Iterable[common_pb2.ShardAddress]
    ) -> pb.OpenRunResponse:
        """Prepare a run."""
        request = pb.OpenRunRequest(
            request_id=new_request_id(), run_id=run_id, term=term, shards=shards
        )
        response: pb.OpenRunResponse = await self._stub.OpenRun(request)
        return response

    async def close_run(self, run_id: str, *, term: int) -> None:
        """End all that a run has there; nothing is saved."""
        request = pb.CloseRunRequest(request_id=new_request_id(), run_id=run_id, term=term)
        await self._stub.CloseRun(request)

    async def bind_policy(
        self,
        run_id: str,
        policy: str,
        *,
        term: int,
        slots: Sequence[str],
        version: int | None,
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> pb.BindPolicyResult:
        """Bind a policy's process group and load its newest saved state, or make set 0.

        Raises:
            DomainError: See `wait`.
        """
        request = pb.BindPolicyRequest(
            request_id=new_request_id(),
            run_id=run_id,
            policy=policy,
            term=term,
            slots=slots,
            version=version,
        )
        response: pb.BindPolicyResponse = await self._stub.BindPolicy(request)
        return (await self.wait(response.operation, timeout_s=timeout_s)).bind

    async def compute_gradients(
        self,
        run_id: str,
        micro_batch: graph_pb2.MicroBatch,
        *,
        term: int,
        version: int,
        weights_hash: str,
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> pb.ComputeGradientsResult:
        """Add the gradients of a micro-batch to its policy's sum.

        Raises:
            DomainError: See `wait`.
        """
        request = pb.ComputeGradientsRequest(
            request_id=new_request_id(),
            run_id=run_id,
            term=term,
            micro_batch=micro_batch,
            version=version,
            weights_hash=weights_hash,
        )
        response: pb.ComputeGradientsResponse = await self._stub.ComputeGradients(request)
        return (await self.wait(response.operation, timeout_s=timeout_s)).gradients

    async def save_gradients(
        self, run_id: str, policy: str, *, term: int, timeout_s: float = OPERATION_TIMEOUT_S
    ) -> pb.StateResult:
        """Write sum and ledger to the store.

        Raises:
            DomainError: See `wait`.
        """
        request = pb.SaveGradientsRequest(
            request_id=new_request_id(), run_id=run_id, policy=policy, term=term
        )
        response: pb.SaveGradientsResponse = await self._stub.SaveGradients(request)
        return (await self.wait(response.operation, timeout_s=timeout_s)).state

    async def apply_update(
        self,
        run_id: str,
        policy: str,
        *,
        term: int,
        batch: int,
        micro_batch_ids: Iterable[str],
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> pb.StateResult:
        """Make the set of version batch + 1.

        Raises:
            DomainError: See `wait`.
        """
        request = pb.ApplyUpdateRequest(
            request_id=new_request_id(),
            run_id=run_id,
            policy=policy,
            term=term,
            batch=batch,
            micro_batch_ids=micro_batch_ids,
        )
        response: pb.ApplyUpdateResponse = await self._stub.ApplyUpdate(request)
        return (await self.wait(response.operation, timeout_s=timeout_s)).state

    async def suspend_policy(
        self, run_id: str, policy: str, *, term: int, timeout_s: float = OPERATION_TIMEOUT_S
    ) -> pb.StateResult:
        """Save what is unsaved and take the slots back.

        Raises:
            DomainError: See `wait`.
        """
        request = pb.SuspendPolicyRequest(
            request_id=new_request_id(), run_id=run_id, policy=policy, term=term
        )
        response: pb.SuspendPolicyResponse = await self._stub.SuspendPolicy(request)
        return (await self.wait(response.operation, timeout_s=timeout_s)).state

    async def wait(self, operation: pb.Operation, *, timeout_s: float) -> pb.Operation:
        """Wait for an operation's end, in steps that each have a deadline.

        Raises:
            DomainError: The operation's failure with its reason; NOT_FOUND when the trainer was
                started anew; DEADLINE_EXCEEDED after `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        while not operation.done:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise make_error(
                    ErrorReason.DEADLINE_EXCEEDED,
                    f"operation {operation.operation_id} did not end within {timeout_s:g} s",
                )
            request = pb.WaitOperationRequest(operation_id=operation.operation_id)
            response: pb.WaitOperationResponse = await self._stub.WaitOperation(
                request, timeout=min(WAIT_STEP_S, max(left_s, 1.0))
            )
            operation = response.operation
        if operation.WhichOneof("result") == "failure":
            failure = operation.failure
            reason = find_reason(failure.reason) or ErrorReason.INTERNAL
            raise make_error(reason, failure.message, dict(failure.metadata))
        return operation

    async def get_status(self) -> pb.TrainerStatus:
        """Slots and bindings."""
        response: pb.GetStatusResponse = await self._stub.GetStatus(pb.GetStatusRequest())
        return response.status

    async def watch_status(self, *, interval_s: float = 0.5) -> AsyncIterator[pb.TrainerStatus]:
        """Slots and bindings at an interval; ends with the trainer, by raising UNAVAILABLE.

        Waits for the next status; freed by it, by the trainer's end, or by closing the iterator.
        """
        call = self._stub.WatchStatus(pb.WatchStatusRequest(interval_ms=int(interval_s * 1000)))
        try:
            async for response in call:
                yield response.status
        finally:
            call.cancel()
            await asyncio.sleep(0)
