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
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.trainer.v1 import rank_pb2, trainer_pb2
from flexmarl.core.activations import MAX_TOKENS
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ledger import Ledger, Presence, check_apply
from flexmarl.core.trainer_slots import Claim
from flexmarl.trainer import records
from flexmarl.trainer.binding_parts import BindingParts, PassBudget
from flexmarl.trainer.keepers import Keepers
from flexmarl.trainer.policy_state import PolicyState
from flexmarl.trainer.pool import Meeting
from flexmarl.trainer.results import added_result
from flexmarl.trainer.rows import PackedRows, pack_rows
from flexmarl.trainer.turns import Turns

_FULL: Final = (ErrorReason.DISK_FULL, ErrorReason.MEMORY_TIER_FULL)
"""A save that found no room changed nothing: the sum is where it was, to be saved again."""

_REFUSED: Final = (ErrorReason.INVALID_ARGUMENT, ErrorReason.OUT_OF_MEMORY)
"""A micro-batch of which nothing was added."""


class Binding:
    """See the module's text."""

    def __init__(self, parts: BindingParts) -> None:
        self._parts = parts
        self._state = PolicyState(parts, check=self._check_claimed)
        self._turns = Turns(
            parts.claim,
            max_queued=parts.max_queued,
            spans=parts.spans,
            totals=parts.totals,
            check=self._check_claimed,
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
            for borrowed in self._parts.borrowed:
                borrowed.drop()

    async def borrow(self) -> None:
        """Waits until other trainers have lent the slots that the policy is to have of them.

        Raises:
            DomainError: See `Borrowed.open`; TERM_STALE when the binding was lost meanwhile.
        """
        await asyncio.gather(*(each.open(on_lost=self.lose) for each in self._parts.borrowed))
        self._check_claimed()

    async def bind(
        self, *, meeting: Meeting, version: int | None, keepers: Keepers | None
    ) -> trainer_pb2.BindPolicyResult:
        """Loads the newest saved state, or makes and saves set 0; see `PolicyState.start`.

        Raises:
            DomainError: See `PolicyState.start`.
        """
        async with self._turns.take("bind"), self._all_or_lost():
            seconds = await self._state.start(meeting, version=version, keepers=keepers)
            return trainer_pb2.BindPolicyResult(
                state=self._state.record,
                seconds=seconds,
                loaded_bytes=self._state.loaded_bytes,
            )

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
        async with self._turn("save"), self._all_or_lost(spare=_FULL):
            return await self._state.save_sum()

    async def apply(self, *, batch: int, micro_batch_ids: Sequence[str]) -> trainer_pb2.StateResult:
        """Makes set batch + 1 of the sum of `batch`; one made before of the same is answered.

        Raises:
            DomainError: VERSION_MISMATCH; STATE_TRANSITION_REFUSED naming the micro-batches that
                are missing, or not asked for.
        """
        async with self._turn("apply", batch=batch):
            state = self._trained_state()
            made_of = records.applied_ledger(state)
            if made_of is not None and made_of.batch == batch:
                records.check_exact(check_apply(made_of, micro_batch_ids), self.claim.key.policy)
                return trainer_pb2.StateResult(state=state, metrics=state.metrics)
            ledger = records.ledger_for(self._state.ledger, batch=batch, what="the update")
            records.check_exact(check_apply(ledger, micro_batch_ids), self.claim.key.policy)
            async with self._state.room_for_set(ledger) as targets, self._all_or_lost():
                return await self._state.step(ledger, targets)

    async def suspend(self) -> trainer_pb2.StateResult:
        """Saves what is unsaved and lets the ranks go.

        Returns:
            The saved state; metric `used_bytes` is what is still in use of the fullest rank's
            memory, measured there: 0.
        """
        async with self._turn("suspend"), self._all_or_lost(spare=_FULL):
            result = await self._state.save_sum()
            self._check_claimed()
            unbind = rank_pb2.RankCommand(unbind=rank_pb2.RankUnbind())
            left = await self._parts.ranks.command(unbind)
            result.metrics["used_bytes"] = max(reply.unbound.used_bytes for reply in left)
            await asyncio.gather(*(each.give_back() for each in self._parts.borrowed))
            self.lose()
            if self._parts.cold_start:
                self._parts.ranks.replace()
            return result

    async def _add(
        self, name: str, ledger: Ledger, packed: PackedRows
    ) -> trainer_pb2.ComputeGradientsResult:
        async with self._all_or_lost(spare=_REFUSED):
            replies = await self._gradients(packed)
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

    async def _gradients(self, packed: PackedRows) -> list[rank_pb2.RankReply]:
        """Lets the ranks work; when a pass does not fit their memory, once more with smaller ones.

        A rank that ran out of memory leaves others waiting in a collective, so several ranks are
        bound again first, which is what CHILD_DIED asks for.
        """
        self._check_claimed()
        ranks, budget = self._parts.ranks, self._parts.budget
        packed.command.max_tokens_per_pass = budget.max_tokens
        try:
            return await ranks.command(rank_pb2.RankCommand(gradients=packed.command))
        except DomainError as error:
            if error.reason is not ErrorReason.OUT_OF_MEMORY:
                raise
            if budget.max_tokens:
                raise _does_not_fit(packed, budget) from error
            configured = self._parts.config.trainer.max_tokens_per_pass or MAX_TOKENS
            budget.max_tokens = max(1, min(configured, packed.num_model_tokens // len(ranks)) // 2)
            if len(ranks) > 1:
                raise DomainError(
                    ErrorReason.CHILD_DIED,
                    f"{packed.command.micro_batch_id}: a rank ran out of memory; the next try "
                    f"makes passes of {budget.max_tokens} tokens",
                ) from error
        packed.command.max_tokens_per_pass = budget.max_tokens
        try:
            return await ranks.command(rank_pb2.RankCommand(gradients=packed.command))
        except DomainError as error:
            if error.reason is not ErrorReason.OUT_OF_MEMORY:
                raise
            raise _does_not_fit(packed, budget) from error

    @asynccontextmanager
    async def _turn(self, activity: str, **args: str | int) -> AsyncIterator[None]:
        """Waits for the operation's turn; a newer owner of the policy ends the binding.

        Raises:
            DomainError: STATE_TRANSITION_REFUSED for work that came before there is a state.
        """
        async with self._turns.take(activity, **args):
            if not self._state.started:
                raise DomainError(
                    ErrorReason.STATE_TRANSITION_REFUSED,
                    f"{self.claim.key} is being bound under term {self.claim.term}; wait for that",
                    {"policy": self.claim.key.policy, "term": str(self.claim.term)},
                )
            try:
                yield
            except DomainError as error:
                if error.reason is ErrorReason.TERM_STALE:
                    self.lose()
                raise

    @asynccontextmanager
    async def _all_or_lost(self, *, spare: Collection[ErrorReason] = ()) -> AsyncIterator[None]:
        """A failure inside loses the binding, but for those that changed nothing (`spare`)."""
        try:
            yield
        except DomainError as error:
            if error.reason not in spare:
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


def _does_not_fit(packed: PackedRows, budget: PassBudget) -> DomainError:
    return DomainError(
        ErrorReason.OUT_OF_MEMORY,
        f"{packed.command.micro_batch_id}: passes of {budget.max_tokens} tokens do not fit the "
        "device either; give the policy more slots, shorter rows, or a smaller model",
        {"micro_batch_id": packed.command.micro_batch_id, "max_tokens": str(budget.max_tokens)},
    )


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Ends a task that nobody needs any more, and forgets how it ended."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
