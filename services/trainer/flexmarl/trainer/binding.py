"""One policy bound to slots: its ranks, its saved state, its ledger. Work on it is serial.

Rules that keep a sum exact:
- The ledger changes when every rank has answered that the sum changed, and only then.
- After a failure in the middle of a change nobody knows what the ranks hold, so the binding is
  lost: its slots are free again, and the next binding loads what was saved last.
- A binding that lost its claim does nothing more, and the store refuses what is on its way, because
  the claim's successor raised the term.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from flexmarl.api.meg_store.v1alpha1 import graph_pb2
from flexmarl.api.trainer.v1alpha1 import rank_pb2, trainer_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ledger import Ledger, Presence, check_apply
from flexmarl.core.trainer_slots import Claim
from flexmarl.trainer import records
from flexmarl.trainer.binding_parts import BindingParts
from flexmarl.trainer.policy_state import PolicyState
from flexmarl.trainer.pool import Meeting
from flexmarl.trainer.results import added_result
from flexmarl.trainer.rows import PackedRows, pack_rows
from flexmarl.trainer.turns import Turns


class Binding:
    """See the module's text."""

    def __init__(self, parts: BindingParts) -> None:
        self._parts = parts
        self._state = PolicyState(parts, check=self._check_claimed)
        self._turns = Turns(
            parts.claim, max_queued=parts.max_queued, spans=parts.spans, check=self._check_claimed
        )
        self.lost = False

    @property
    def claim(self) -> Claim:
        """Policy, term and slots."""
        return self._parts.claim

    @property
    def activity(self) -> str:
        """Operation in progress; "" when idle."""
        return self._turns.activity

    @property
    def state_bytes(self) -> int:
        """Bytes of state on each rank."""
        return self._state.size_bytes

    def lose(self) -> None:
        """Ends the binding without saving; what it is doing fails at its next step."""
        if not self.lost:
            self.lost = True
            self._parts.on_lost(self.claim)

    async def bind(self, *, meeting: Meeting, version: int | None) -> trainer_pb2.BindPolicyResult:
        """Loads the newest saved state, or makes and saves set 0.

        Raises:
            DomainError: See `PolicyState.start`.
        """
        async with self._turn("bind"), self._all_or_lost():
            seconds = await self._state.start(meeting, version=version)
            return trainer_pb2.BindPolicyResult(state=self._state.record, seconds=seconds)

    async def add(
        self,
        micro_batch: graph_pb2.MicroBatch,
        *,
        version: int,
        weights_hash: str,
        fetch: Callable[[], Coroutine[None, None, Sequence[graph_pb2.Vertex]]],
    ) -> trainer_pb2.ComputeGradientsResult:
        """Adds a micro-batch's gradient to the sum; one that is in it already is answered at once.

        Args:
            micro_batch: The record.
            version: Version that its rows carry.
            weights_hash: Weights that its rows carry.
            fetch: Reads the rows; begun before this operation's turn comes.

        Raises:
            DomainError: VERSION_MISMATCH, WEIGHTS_MISMATCH, and see `pack_rows`.
        """
        name = micro_batch.micro_batch_id
        fetched = asyncio.create_task(fetch(), name=f"rows of {name}")
        try:
            async with self._turn("gradients", micro_batch=name):
                state = self._trained_state()
                known = self._state.presence(name, batch=version)
                if known is not Presence.NEW:
                    return added_result(name, known)
                ledger = records.ledger_for(self._state.ledger, batch=version, what=name)
                records.check_weights(state, weights_hash, what=name)
                started = time.perf_counter()
                packed = pack_rows(
                    await fetched,
                    micro_batch=micro_batch,
                    version=version,
                    weights_hash=weights_hash,
                    num_updates=state.num_updates,
                )
                fetch_s = time.perf_counter() - started
                result = await self._add(name, ledger, packed)
                result.seconds["fetch"] = fetch_s
                return result
        finally:
            await cancelled(fetched)

    async def save(self) -> trainer_pb2.StateResult:
        """Writes sum and ledger, if they are not saved yet."""
        async with self._turn("save"), self._all_or_lost():
            return await self._state.save_sum()

    async def apply(self, *, batch: int, micro_batch_ids: Sequence[str]) -> trainer_pb2.StateResult:
        """Makes set batch + 1 of the sum of `batch`; a set made before is answered.

        Raises:
            DomainError: VERSION_MISMATCH; STATE_TRANSITION_REFUSED naming missing micro-batches.
        """
        async with self._turn("apply", batch=batch):
            state = self._trained_state()
            if state.applied and state.version == batch + 1:
                return trainer_pb2.StateResult(state=state, metrics=state.metrics)
            ledger = records.ledger_for(self._state.ledger, batch=batch, what="the update")
            records.check_exact(check_apply(ledger, micro_batch_ids), self.claim.key.policy)
            async with self._all_or_lost():
                return await self._state.step(ledger)

    async def suspend(self) -> trainer_pb2.StateResult:
        """Saves what is unsaved and lets the ranks go."""
        async with self._turn("suspend"), self._all_or_lost():
            result = await self._state.save_sum()
            self._check_claimed()
            await self._parts.ranks.command(rank_pb2.RankCommand(unbind=rank_pb2.RankUnbind()))
            self.lose()
            return result

    async def _add(
        self, name: str, ledger: Ledger, packed: PackedRows
    ) -> trainer_pb2.ComputeGradientsResult:
        async with self._all_or_lost(spare=ErrorReason.INVALID_ARGUMENT):
            self._check_claimed()
            command = rank_pb2.RankCommand(gradients=packed.command)
            replies = await self._parts.ranks.command(command)
        if all(reply.added.finite for reply in replies):
            self._state.ledger = ledger.add(name, packed.counts)
        else:
            self._state.ledger = ledger.drop(name)
        return added_result(
            name,
            self._state.ledger.presence(name),
            counts=packed.counts,
            denominator=self._parts.config.loss.denominator(packed.counts),
            num_model_tokens=packed.num_model_tokens,
            ranks=[reply.added for reply in replies],
        )

    @asynccontextmanager
    async def _turn(self, activity: str, **args: str | int) -> AsyncIterator[None]:
        """Waits for the operation's turn; a newer owner of the policy ends the binding."""
        async with self._turns.take(activity, **args):
            try:
                yield
            except DomainError as error:
                if error.reason is ErrorReason.TERM_STALE:
                    self.lose()
                raise

    @asynccontextmanager
    async def _all_or_lost(self, *, spare: ErrorReason | None = None) -> AsyncIterator[None]:
        """A failure inside loses the binding, but for a refusal that changed nothing (`spare`)."""
        try:
            yield
        except DomainError as error:
            if error.reason is not spare:
                self.lose()
            raise
        except BaseException:
            self.lose()
            raise

    def _trained_state(self) -> graph_pb2.StateRecord:
        if self._parts.frozen:
            raise DomainError(
                ErrorReason.STATE_TRANSITION_REFUSED,
                f"policy {self.claim.key.policy} is frozen: it has no gradients",
            )
        return self._state.record

    def _check_claimed(self) -> None:
        if self.lost:
            raise DomainError(
                ErrorReason.TERM_STALE,
                f"{self.claim.key} is no longer bound under term {self.claim.term}",
                {"policy": self.claim.key.policy, "term": str(self.claim.term)},
            )


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Ends a task that nobody needs any more, and forgets how it ended."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
