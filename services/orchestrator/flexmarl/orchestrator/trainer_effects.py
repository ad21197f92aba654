"""Effects on one Trainer: bindings and the operations on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from flexmarl.api.trainer.v1 import trainer_pb2 as pb
from flexmarl.client.trainer import TrainerClient
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.fencing import policy_scope
from flexmarl.core.run_effects import (
    Apply,
    Bind,
    Compute,
    OpenTrainer,
    Prefetch,
    SaveGradients,
    Suspend,
    TrainerWork,
)
from flexmarl.core.run_events import Computed, StateSaved, TrainerOpened
from flexmarl.orchestrator.calls import fenced, waiting
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.convert import state_fact
from flexmarl.runtime.logging import get_logger

_log = get_logger(__name__)

GIVE_UP_TIMEOUT_S: Final = 30.0
"""How long a failed binding's slots are waited for."""

_BINDING_IS_GONE: Final = frozenset(
    {
        ErrorReason.CHILD_DIED,
        ErrorReason.RUN_NOT_FOUND,
        ErrorReason.TERM_STALE,
        ErrorReason.UNAVAILABLE,
    }
)


class TrainerEffects:
    """Executes effects on one trainer.

    Args:
        client: Of the trainer.
        context: The run.
        operation_timeout_s: Longest operation.
    """

    def __init__(
        self, client: TrainerClient, context: RunContext, *, operation_timeout_s: float
    ) -> None:
        self._client = client
        self._context = context
        self._timeout_s = operation_timeout_s
        self._terms: dict[int, int] = {}
        self.address = client.address
        self.incarnation = ""

    async def open(self, effect: OpenTrainer) -> TrainerOpened:
        """Open the run there, with all slots free.

        What an orchestrator before this one has bound is let go of unsaved: the ledgers say what
        has to be computed again.
        """
        with waiting(effect.waits), fenced():
            response = await self._open()
            status = await self._client.get_status()
            if any(slot.run_id == self._context.run_id for slot in status.slots):
                await self.close()
                response = await self._open()
        self.incarnation = response.incarnation
        return TrainerOpened(tuple(response.slots))

    async def perform(self, effect: TrainerWork) -> Computed | StateSaved:
        """Run one operation on a binding to its end.

        Raises:
            DomainError: It failed; the binding has been given up then.
        """
        try:
            with waiting(effect.waits):
                return await self._perform(effect)
        except DomainError as error:
            if error.reason not in _BINDING_IS_GONE and not isinstance(effect, Bind):
                await self._give_up(effect)
            raise

    async def prefetch(self, effect: Prefetch) -> None:
        """Have a policy's state loaded where it will be bound next.

        Raises:
            DomainError: It was not; the binding loads it then.
        """
        with waiting(effect.waits):
            await self._client.prefetch_policy(
                self._context.run_id, effect.policy, slots=effect.slots, timeout_s=self._timeout_s
            )

    async def status(self) -> pb.TrainerStatus:
        """Slots and bindings now."""
        return await self._client.get_status()

    async def close(self) -> None:
        """End all that the run has there."""
        await self._client.close_run(self._context.run_id, term=self._context.term)

    def watch(self, *, interval_s: float) -> AsyncGenerator[pb.TrainerStatus, None]:
        """Its states."""
        return self._client.watch_status(interval_s=interval_s)

    async def _open(self) -> pb.OpenRunResponse:
        context = self._context
        return await self._client.open_run(context.run_id, term=context.term, shards=context.shards)

    async def _perform(self, effect: TrainerWork) -> Computed | StateSaved:
        if isinstance(effect, Bind):
            return await self._bind(effect)
        if isinstance(effect, Compute):
            return await self._compute(effect)
        result = await self._save(effect)
        self._context.save_seen(result.state)
        return StateSaved(state_fact(result.state), dict(result.metrics))

    async def _bind(self, effect: Bind) -> StateSaved:
        context = self._context
        await context.confirm_term()
        term = await context.store.acquire_term(
            context.run_id, policy_scope(effect.policy), holder=self.address
        )
        self._terms[effect.binding] = term
        result = await self._client.bind_policy(
            context.run_id,
            effect.policy,
            term=term,
            slots=effect.slots,
            beyond=[
                pb.TrainerSlots(address=place.trainer, slots=place.slots) for place in effect.beyond
            ],
            version=effect.version,
            timeout_s=self._timeout_s,
        )
        context.train_means.spend(effect.policy, _prefixed("swap_in", result.seconds))
        context.save_seen(result.state)
        return StateSaved(state_fact(result.state))

    async def _compute(self, effect: Compute) -> Computed:
        context = self._context
        assert context.manifest is not None, "gradients are computed at a committed version"
        result = await self._client.compute_gradients(
            context.run_id,
            context.micro_batches[effect.micro_batch_id],
            term=self._terms[effect.binding],
            version=effect.batch,
            weights_hash=context.manifest.policies[effect.policy].weights_hash,
            timeout_s=self._timeout_s,
        )
        means = context.train_means
        means.add(effect.policy, result.metrics, weight=float(max(result.counts.num_tokens, 1)))
        means.spend(effect.policy, result.seconds)
        if result.non_finite:
            means.count(effect.policy, "non_finite")
            _log.warning(
                "gradient_not_finite", policy=effect.policy, micro_batch=effect.micro_batch_id
            )
        return Computed(result.non_finite, dict(result.metrics))

    async def _save(self, effect: Apply | SaveGradients | Suspend) -> pb.StateResult:
        run_id, policy = self._context.run_id, effect.policy
        term, timeout_s = self._terms[effect.binding], self._timeout_s
        match effect:
            case Apply():
                result = await self._client.apply_update(
                    run_id,
                    policy,
                    term=term,
                    batch=effect.batch,
                    micro_batch_ids=effect.micro_batch_ids,
                    timeout_s=timeout_s,
                )
                self._context.train_means.put(policy, result.metrics)
                self._context.train_means.spend(policy, _prefixed("update", result.seconds))
                return result
            case SaveGradients():
                return await self._client.save_gradients(
                    run_id, policy, term=term, timeout_s=timeout_s
                )
            case Suspend():
                result = await self._client.suspend_policy(
                    run_id, policy, term=term, timeout_s=timeout_s
                )
                self._terms.pop(effect.binding, None)
                self._context.train_means.spend(policy, _prefixed("swap_out", result.seconds))
                return result

    async def _give_up(self, effect: TrainerWork) -> None:
        """Have the trainer free the slots of a binding that is not trusted any more."""
        try:
            async with asyncio.timeout(GIVE_UP_TIMEOUT_S):
                await self._client.suspend_policy(
                    self._context.run_id, effect.policy, term=self._terms[effect.binding]
                )
        except (DomainError, TimeoutError) as error:
            _log.info("binding_not_given_up", policy=effect.policy, why=str(error))


def _prefixed(word: str, seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{word}_{part}": value for part, value in seconds.items()}
