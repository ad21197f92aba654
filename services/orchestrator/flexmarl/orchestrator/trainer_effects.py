"""Effects on one Trainer: bindings and the operations on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from flexmarl.api.trainer.v1alpha1 import trainer_pb2 as pb
from flexmarl.api.trainer.v1alpha1.trainer_pb2_grpc import TrainerServiceStub
from flexmarl.client.channel import Channel
from flexmarl.client.errors import DeadlineError, UnavailableError, make_error
from flexmarl.client.request import new_request_id
from flexmarl.core.errors import DomainError, ErrorReason, find_reason
from flexmarl.core.fencing import policy_scope
from flexmarl.core.run_effects import (
    Apply,
    Bind,
    Compute,
    OpenTrainer,
    SaveGradients,
    Suspend,
    TrainerWork,
)
from flexmarl.core.run_events import Computed, StateSaved, TrainerOpened
from flexmarl.orchestrator.calls import back_off, patiently
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.convert import failure_of, state_fact
from flexmarl.runtime.logging import get_logger

T = TypeVar("T")

_log = get_logger(__name__)

WITHOUT_DEADLINE: Final = ("/flexmarl.api.trainer.v1alpha1.TrainerService/WatchStatus",)
"""Streams that live as long as the run."""

OPEN_TIMEOUT_S: Final = 120.0
"""OpenRun may unpack models."""

CALL_TIMEOUT_S: Final = 20.0
GIVE_UP_TIMEOUT_S: Final = 30.0
"""How long a failed binding's slots are waited for."""

_BINDING_IS_GONE: Final = frozenset(
    {
        ErrorReason.CHILD_DIED,
        ErrorReason.NOT_FOUND,
        ErrorReason.RUN_NOT_FOUND,
        ErrorReason.TERM_STALE,
        ErrorReason.STATE_TRANSITION_REFUSED,
        ErrorReason.UNAVAILABLE,
    }
)

WAIT_S: Final = 10.0
"""Longest single WaitOperation; the operation goes on."""


class TrainerEffects:
    """Executes effects on one trainer.

    Args:
        channel: To the trainer.
        context: The run.
        patience_s: How long it is waited for.
        operation_timeout_s: Longest operation.
    """

    def __init__(
        self,
        channel: Channel,
        context: RunContext,
        *,
        patience_s: float,
        operation_timeout_s: float,
    ) -> None:
        self._stub: Any = TrainerServiceStub(channel)
        self._context = context
        self._patience_s = patience_s
        self._operation_timeout_s = operation_timeout_s
        self._terms: dict[int, int] = {}
        self.address = channel.address
        self.incarnation = ""

    async def open(self, effect: OpenTrainer) -> TrainerOpened:
        """Open the run there, with all slots free.

        What an orchestrator before this one has bound is let go of unsaved: the ledgers say what
        has to be computed again.
        """
        response = await self._open(effect)
        status = await self._patiently(self.status, effect)
        if any(slot.run_id == self._context.run_id for slot in status.slots):
            await self._patiently(self.close, effect)
            response = await self._open(effect)
        self.incarnation = response.incarnation
        return TrainerOpened(tuple(response.slots))

    async def perform(self, effect: TrainerWork) -> Computed | StateSaved:
        """Run one operation on a binding to its end.

        Raises:
            DomainError: It failed; the binding has been given up then.
        """
        try:
            return await self._perform(effect)
        except DomainError as error:
            if error.reason not in _BINDING_IS_GONE and not isinstance(effect, Bind):
                await self._give_up(effect)
            raise

    async def _perform(self, effect: TrainerWork) -> Computed | StateSaved:
        match effect:
            case Bind():
                return await self._bind(effect)
            case Compute():
                return await self._compute(effect)
            case Apply():
                request = pb.ApplyUpdateRequest(
                    **self._about(effect),
                    batch=effect.batch,
                    micro_batch_ids=effect.micro_batch_ids,
                )
                return await self._saved(effect, self._stub.ApplyUpdate, request)
            case SaveGradients():
                save = pb.SaveGradientsRequest(**self._about(effect))
                return await self._saved(effect, self._stub.SaveGradients, save)
            case Suspend():
                suspend = pb.SuspendPolicyRequest(**self._about(effect))
                result = await self._saved(effect, self._stub.SuspendPolicy, suspend)
                self._terms.pop(effect.binding, None)
                return result

    async def status(self) -> pb.TrainerStatus:
        """Slots and bindings now."""
        response = await self._stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        status: pb.TrainerStatus = response.status
        return status

    async def close(self) -> None:
        """End all that the run has there."""
        request = pb.CloseRunRequest(
            request_id=new_request_id(), run_id=self._context.run_id, term=self._context.term
        )
        await self._stub.CloseRun(request, timeout=CALL_TIMEOUT_S)

    def watch(self, *, interval_ms: int) -> Any:  # noqa: ANN401 - a stream call
        """Open the stream of states."""
        return self._stub.WatchStatus(pb.WatchStatusRequest(interval_ms=interval_ms))

    async def _open(self, effect: OpenTrainer) -> pb.OpenRunResponse:
        context = self._context
        request = pb.OpenRunRequest(
            request_id=new_request_id(),
            run_id=context.run_id,
            term=context.term,
            shards=context.shards,
        )
        response: pb.OpenRunResponse = await self._patiently(
            lambda: self._stub.OpenRun(request, timeout=OPEN_TIMEOUT_S), effect
        )
        return response

    async def _patiently(self, call: Callable[[], Awaitable[T]], effect: OpenTrainer) -> T:
        return await patiently(call, patience_s=self._patience_s, what=effect.waits)

    async def _give_up(self, effect: TrainerWork) -> None:
        """Have the trainer free the slots of a binding that is not trusted any more."""
        request = pb.SuspendPolicyRequest(**self._about(effect))
        try:
            async with asyncio.timeout(GIVE_UP_TIMEOUT_S):
                await self._operate(effect, self._stub.SuspendPolicy, request)
        except (DomainError, TimeoutError) as error:
            _log.info("binding_not_given_up", policy=effect.policy, why=str(error))

    async def _bind(self, effect: Bind) -> StateSaved:
        context = self._context
        await context.confirm_term()
        term = await context.store.acquire_term(
            context.run_id, policy_scope(effect.policy), holder=self.address
        )
        self._terms[effect.binding] = term
        request = pb.BindPolicyRequest(
            **self._about(effect), slots=effect.slots, version=effect.version
        )
        operation = await self._operate(effect, self._stub.BindPolicy, request)
        context.save_seen(operation.bind.state)
        return StateSaved(state_fact(operation.bind.state))

    async def _compute(self, effect: Compute) -> Computed:
        context = self._context
        assert context.manifest is not None, "gradients are computed at a committed version"
        request = pb.ComputeGradientsRequest(
            request_id=new_request_id(),
            run_id=context.run_id,
            term=self._terms[effect.binding],
            micro_batch=context.micro_batches[effect.micro_batch_id],
            version=effect.batch,
            weights_hash=context.manifest.policies[effect.policy].weights_hash,
        )
        operation = await self._operate(effect, self._stub.ComputeGradients, request)
        result = operation.gradients
        context.train_means.add(
            effect.policy, result.metrics, weight=float(max(result.counts.num_tokens, 1))
        )
        return Computed(result.non_finite, dict(result.metrics))

    async def _saved(
        self,
        effect: TrainerWork,
        method: Callable[..., Awaitable[Any]],
        request: Any,  # noqa: ANN401 - any of the starting requests
    ) -> StateSaved:
        operation = await self._operate(effect, method, request)
        result = operation.state
        self._context.save_seen(result.state)
        if isinstance(effect, Apply):
            self._context.train_means.put(effect.policy, result.metrics)
        return StateSaved(state_fact(result.state), dict(result.metrics))

    def _about(self, effect: TrainerWork) -> dict[str, Any]:
        return {
            "request_id": new_request_id(),
            "run_id": self._context.run_id,
            "policy": effect.policy,
            "term": self._terms[effect.binding],
        }

    async def _operate(
        self,
        effect: TrainerWork,
        method: Callable[..., Awaitable[Any]],
        request: Any,  # noqa: ANN401 - any of the starting requests
    ) -> pb.Operation:
        """Start an operation and wait for its end.

        Waits for the trainer, in steps of `WAIT_S`; freed by the operation's end, by a trainer that
        does not know it (it was started anew), or after `operation_timeout_s`.

        Raises:
            DomainError: The operation failed, or its trainer is gone.
        """
        begun = heard = time.monotonic()
        call: Callable[[], Awaitable[Any]] = lambda: method(request, timeout=CALL_TIMEOUT_S)  # noqa: E731
        failed = 0
        while True:
            try:
                operation: pb.Operation = (await call()).operation
                if operation.done:
                    return _succeeded(operation)
                heard, failed = time.monotonic(), 0
                call = self._wait(operation.operation_id)
            except DeadlineError:
                failed += 1
            except UnavailableError as error:
                failed += 1
                if time.monotonic() - heard > self._patience_s:
                    raise make_error(
                        ErrorReason.UNAVAILABLE,
                        f"{effect.waits}: no answer for {self._patience_s:g} s ({error.message})",
                    ) from None
            if time.monotonic() - begun > self._operation_timeout_s:
                raise make_error(
                    ErrorReason.DEADLINE_EXCEEDED,
                    f"{effect.waits}: not done after {self._operation_timeout_s:g} s",
                )
            if failed:
                await back_off(failed)
            else:
                await asyncio.sleep(0)

    def _wait(self, operation_id: str) -> Callable[[], Awaitable[Any]]:
        request = pb.WaitOperationRequest(operation_id=operation_id)
        return lambda: self._stub.WaitOperation(request, timeout=WAIT_S)


def _succeeded(operation: pb.Operation) -> pb.Operation:
    if operation.WhichOneof("result") != "failure":
        return operation
    failure = failure_of(operation.failure)
    reason = find_reason(failure.reason) or ErrorReason.INTERNAL
    raise make_error(reason, failure.message, failure.metadata)
