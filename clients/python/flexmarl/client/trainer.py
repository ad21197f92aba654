"""The trainer's typed client: operations are started, waited for in bounded steps, and unpacked."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.trainer.v1 import trainer_pb2 as pb
from flexmarl.api.trainer.v1.trainer_pb2_grpc import TrainerServiceStub
from flexmarl.client.base import ServiceClient
from flexmarl.client.channel import StreamCall
from flexmarl.client.errors import make_error
from flexmarl.client.request import new_request_id
from flexmarl.core.errors import ErrorReason, find_reason

WAIT_STEP_S: Final = 10.0
"""Longest single WaitOperation; the operation goes on."""

OPERATION_TIMEOUT_S: Final = 3600.0
"""Longest wait for an operation unless the caller says otherwise."""


class TrainerClient(ServiceClient):
    """Client of one trainer; see `ServiceClient` for its arguments.

    Methods that work on a policy start an operation and return its result when it ends. They raise
    the operation's failure with its reason, and DEADLINE_EXCEEDED after `timeout_s`. A request id
    is made once per call, so a call that is repeated inside finds its operation again. When the
    trainer died in between, its successor does not know the operation: NOT_FOUND is raised, and the
    policy is not bound there any more.
    """

    STUB = TrainerServiceStub

    async def open_run(
        self, run_id: str, *, term: int, shards: Iterable[common_pb2.ShardAddress]
    ) -> pb.OpenRunResponse:
        """Prepare a run."""
        request = pb.OpenRunRequest(
            request_id=new_request_id(), run_id=run_id, term=term, shards=shards
        )
        response: pb.OpenRunResponse = await self._call("OpenRun", request)
        return response

    async def close_run(self, run_id: str, *, term: int) -> None:
        """End all that a run has there; nothing is saved."""
        request = pb.CloseRunRequest(request_id=new_request_id(), run_id=run_id, term=term)
        await self._call("CloseRun", request)

    async def bind_policy(
        self,
        run_id: str,
        policy: str,
        *,
        term: int,
        slots: Sequence[str],
        version: int | None,
        beyond: Iterable[pb.TrainerSlots] = (),
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> pb.BindPolicyResult:
        """Bind a policy's process group and load its newest saved state, or make set 0.

        Slots of further trainers (`beyond`) are borrowed by this one, which leads from then on.
        """
        request = pb.BindPolicyRequest(
            request_id=new_request_id(),
            run_id=run_id,
            policy=policy,
            term=term,
            slots=slots,
            version=version,
            beyond=beyond,
        )
        operation = await self._operate("BindPolicy", request, timeout_s=timeout_s)
        return operation.bind

    async def prefetch_policy(
        self,
        run_id: str,
        policy: str,
        *,
        slots: Sequence[str],
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> pb.PrefetchResult:
        """Load a policy's saved state beside what the slots do; a hint that changes nothing."""
        request = pb.PrefetchPolicyRequest(
            request_id=new_request_id(), run_id=run_id, policy=policy, slots=slots
        )
        operation = await self._operate("PrefetchPolicy", request, timeout_s=timeout_s)
        return operation.prefetch

    async def cancel_operation(self, operation_id: str) -> None:
        """Ask an operation to stop."""
        request = pb.CancelOperationRequest(request_id=new_request_id(), operation_id=operation_id)
        await self._call("CancelOperation", request)

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
        """Add the gradients of a micro-batch to its policy's sum."""
        request = pb.ComputeGradientsRequest(
            request_id=new_request_id(),
            run_id=run_id,
            term=term,
            micro_batch=micro_batch,
            version=version,
            weights_hash=weights_hash,
        )
        operation = await self._operate("ComputeGradients", request, timeout_s=timeout_s)
        return operation.gradients

    async def save_gradients(
        self, run_id: str, policy: str, *, term: int, timeout_s: float = OPERATION_TIMEOUT_S
    ) -> pb.StateResult:
        """Write sum and ledger to the store."""
        request = pb.SaveGradientsRequest(
            request_id=new_request_id(), run_id=run_id, policy=policy, term=term
        )
        operation = await self._operate("SaveGradients", request, timeout_s=timeout_s)
        return operation.state

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
        """Make the set of version batch + 1."""
        request = pb.ApplyUpdateRequest(
            request_id=new_request_id(),
            run_id=run_id,
            policy=policy,
            term=term,
            batch=batch,
            micro_batch_ids=micro_batch_ids,
        )
        operation = await self._operate("ApplyUpdate", request, timeout_s=timeout_s)
        return operation.state

    async def suspend_policy(
        self, run_id: str, policy: str, *, term: int, timeout_s: float = OPERATION_TIMEOUT_S
    ) -> pb.StateResult:
        """Save what is unsaved and take the slots back."""
        request = pb.SuspendPolicyRequest(
            request_id=new_request_id(), run_id=run_id, policy=policy, term=term
        )
        operation = await self._operate("SuspendPolicy", request, timeout_s=timeout_s)
        return operation.state

    def lend_slots(self, said: AsyncIterator[pb.LendSlotsRequest]) -> StreamCall:
        """Borrow slots for a group that another trainer leads; they are lent while this lasts."""
        call: StreamCall = self._stub.LendSlots(said)
        return call

    async def get_status(self) -> pb.TrainerStatus:
        """Slots and bindings."""
        response: pb.GetStatusResponse = await self._call("GetStatus", pb.GetStatusRequest())
        return response.status

    async def watch_status(
        self, *, interval_s: float = 0.5
    ) -> AsyncGenerator[pb.TrainerStatus, None]:
        """Slots and bindings at an interval, through restarts; compare the incarnation.

        Waits for the next status; freed by it, by a trainer that stays away (UNAVAILABLE), or by
        closing the iterator.
        """
        request = pb.WatchStatusRequest(interval_ms=int(interval_s * 1000))
        async with aclosing(self._follow(lambda: self._stub.WatchStatus(request))) as responses:
            async for response in responses:
                yield response.status

    async def _operate(
        self,
        method: str,
        request: Any,  # noqa: ANN401 - any of the starting requests
        *,
        timeout_s: float,
    ) -> pb.Operation:
        """Start an operation and wait for its end, in steps that each have a deadline."""
        end = time.monotonic() + timeout_s
        operation: pb.Operation = (await self._call(method, request)).operation
        while not operation.done:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise make_error(
                    ErrorReason.DEADLINE_EXCEEDED,
                    f"{self.address}: {method} is not done after {timeout_s:g} s",
                )
            wait = pb.WaitOperationRequest(operation_id=operation.operation_id)
            step_s = min(WAIT_STEP_S, max(left_s, 1.0))
            operation = (await self._call("WaitOperation", wait, timeout_s=step_s)).operation
        if operation.WhichOneof("result") == "failure":
            failure = operation.failure
            reason = find_reason(failure.reason) or ErrorReason.INTERNAL
            raise make_error(reason, failure.message, dict(failure.metadata))
        return operation
