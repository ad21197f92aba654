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
from dataclasses import dataclass
from typing import Any

from flexmarl.api.meg_store.v1alpha1 import graph_pb2, meg_store_pb2
from flexmarl.api.trainer.v1alpha1 import rank_pb2, trainer_pb2
from flexmarl.client.store import StoreClient
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ledger import Ledger, Presence, check_apply
from flexmarl.core.trainer_slots import Claim
from flexmarl.runtime.run_config import PolicyConfig
from flexmarl.runtime.spans import SpanRecorder
from flexmarl.trainer import records
from flexmarl.trainer.pool import Meeting
from flexmarl.trainer.results import added_result, largest
from flexmarl.trainer.rows import PackedRows, pack_rows
from flexmarl.trainer.segments import StateSegments, StateTargets
from flexmarl.trainer.workers import Worker

STATE_KINDS = ("weights", "master", "moments")

_REFUSAL_GRACE_S = 5.0
"""How long the other ranks may take to answer once one has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingParts:
    """What a binding is made of.

    Attributes:
        claim: Policy, term and slots.
        config: The policy.
        model_path: Folder of its base model on this node.
        init_seed: Seed of its initial weights.
        workers: Workers of the slots, in order of rank.
        store: Home store.
        segments: Its segments.
        spans: Timeline.
        command_timeout_s: Longest work of a rank on one command.
        max_queued: Most operations that wait.
        on_lost: Gives the claim back when the binding is lost.
    """

    claim: Claim
    config: PolicyConfig
    model_path: str
    init_seed: int
    workers: tuple[Worker, ...]
    store: StoreClient
    segments: StateSegments
    spans: SpanRecorder
    command_timeout_s: float
    max_queued: int
    on_lost: Callable[[Claim], None]


class Binding:
    """See the module's text."""

    def __init__(self, parts: BindingParts) -> None:
        self._parts = parts
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._parameters: list[meg_store_pb2.NamedBuffer] = []
        self._state: graph_pb2.StateRecord | None = None
        self._ledger = Ledger(batch=0)
        self._saved_ledger = self._ledger
        self._num_saves = 0
        self.lost = False
        self.activity = ""
        self.state_bytes = 0

    @property
    def claim(self) -> Claim:
        """Policy, term and slots."""
        return self._parts.claim

    def lose(self) -> None:
        """Ends the binding without saving; what it is doing fails at its next step."""
        if not self.lost:
            self.lost = True
            self._parts.on_lost(self.claim)

    async def bind(self, *, meeting: Meeting, version: int | None) -> trainer_pb2.BindPolicyResult:
        """Loads the newest saved state, or makes and saves set 0.

        Raises:
            DomainError: VERSION_MISMATCH when the saved state is not of this or the next version;
                MODEL_INVALID, CHILD_DIED, and what the store answers.
        """
        async with self._at_work("bind"), self._all_or_lost():
            policy = self.claim.key.policy
            state = await self._parts.store.get_state(self.claim.key.run_id, policy)
            records.check_loadable(state, policy=policy, version=version)
            if state is None:
                seconds = await self._make_first_set(meeting)
            else:
                seconds = await self._load(meeting, state, version=version)
            assert self._state is not None
            return trainer_pb2.BindPolicyResult(state=self._state, seconds=seconds)

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
            async with self._at_work("gradients", micro_batch=name):
                state = self._trained_state()
                known = self._known(state, name, version=version)
                if known is not Presence.NEW:
                    return added_result(name, known)
                ledger = records.ledger_for(self._ledger, batch=version, what=name)
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

    async def _add(
        self, name: str, ledger: Ledger, packed: PackedRows
    ) -> trainer_pb2.ComputeGradientsResult:
        async with self._all_or_lost(spare=ErrorReason.INVALID_ARGUMENT):
            replies = await self._command(rank_pb2.RankCommand(gradients=packed.command))
        if all(reply.added.finite for reply in replies):
            self._ledger = ledger.add(name, packed.counts)
        else:
            self._ledger = ledger.drop(name)
        return added_result(
            name,
            self._ledger.presence(name),
            counts=packed.counts,
            ranks=[reply.added for reply in replies],
        )

    def _known(self, state: graph_pb2.StateRecord, name: str, *, version: int) -> Presence:
        for ledger in (self._ledger, records.applied_ledger(state)):
            if ledger is not None and ledger.batch == version:
                return ledger.presence(name)
        return Presence.NEW

    async def save(self) -> trainer_pb2.StateResult:
        """Writes sum and ledger, if they are not saved yet."""
        async with self._at_work("save"):
            return await self._save()

    async def apply(self, *, batch: int, micro_batch_ids: Sequence[str]) -> trainer_pb2.StateResult:
        """Makes set batch + 1 of the sum of `batch`; a set made before is answered.

        The sum is not saved on its own first: set, ledger and marks are one SaveState, so after a
        crash either all of it is there, or the newest save of set `batch` is and the rest is
        computed again, which costs computing and never rows.

        Raises:
            DomainError: VERSION_MISMATCH; STATE_TRANSITION_REFUSED naming missing micro-batches.
        """
        async with self._at_work("apply", batch=batch):
            state = self._trained_state()
            if state.applied and state.version == batch + 1:
                return trainer_pb2.StateResult(state=state, metrics=state.metrics)
            ledger = records.ledger_for(self._ledger, batch=batch, what="the update")
            records.check_exact(check_apply(ledger, micro_batch_ids), self.claim.key.policy)
            async with self._all_or_lost():
                return await self._step(state, ledger)

    async def suspend(self) -> trainer_pb2.StateResult:
        """Saves what is unsaved and lets the ranks go.

        Master and moments did not change since they were saved with their set, so a swap in the
        middle of a batch writes the sum alone.
        """
        async with self._at_work("suspend"):
            result = await self._save()
            async with self._all_or_lost():
                await self._command(rank_pb2.RankCommand(unbind=rank_pb2.RankUnbind()))
            self.lose()
            return result

    async def _make_first_set(self, meeting: Meeting) -> dict[str, float]:
        frozen = self._parts.config.kind == "frozen"
        initial = rank_pb2.RankInitial(seed=self._parts.init_seed)
        bound = await self._bind_ranks(meeting, rank_pb2.RankBind(initial=initial))
        seconds = dict(bound.seconds)
        kinds = STATE_KINDS[:1] if frozen else STATE_KINDS
        async with self._targets(kinds, version=0) as targets:
            export = rank_pb2.RankExport(targets=targets.for_ranks())
            replies = await self._command(rank_pb2.RankCommand(export=export))
            weights_hash = replies[0].written.weights_hash
            refs = await targets.seal(weights_hash=weights_hash)
        await self._write(
            records.first_state(self.claim, refs, weights_hash=weights_hash), Ledger(batch=0)
        )
        return seconds

    async def _load(
        self, meeting: Meeting, state: graph_pb2.StateRecord, *, version: int | None
    ) -> dict[str, float]:
        self._state = state
        self._ledger = self._saved_ledger = records.ledger_of(state, version=version)
        if self._parts.config.kind == "frozen":
            return {}
        refs = {"master": state.master, "moments": state.moments}
        if all(
            worker.resident == (state.master.key, state.moments.key) for worker in self._workers
        ):
            refs = {}
        if self._ledger.added:
            refs["gradients"] = state.gradients
        async with self._parts.segments.opened(refs) as segments:
            saved = rank_pb2.RankSaved(
                master_key=state.master.key, moments_key=state.moments.key, segments=segments
            )
            bound = await self._bind_ranks(meeting, rank_pb2.RankBind(saved=saved))
        for worker in self._workers:
            worker.resident = (state.master.key, state.moments.key)
        return dict(bound.seconds)

    async def _bind_ranks(
        self, meeting: Meeting, template: rank_pb2.RankBind
    ) -> rank_pb2.RankBound:
        for worker in self._workers:
            worker.resident = None
        template.binding = str(self.claim.key)
        template.policy_json = self._parts.config.model_dump_json().encode()
        template.model_path = self._parts.model_path
        template.members.extend(worker.position for worker in self._workers)
        template.group_prefix = meeting.prefix
        template.store_host = meeting.host
        template.store_port = meeting.port
        commands = []
        for rank in range(len(self._workers)):
            command = rank_pb2.RankCommand(bind=template)
            command.bind.rank = rank
            commands.append(command)
        replies = await self._command(*commands)
        self._parameters = list(replies[0].bound.parameters)
        self.state_bytes = replies[0].bound.state_bytes
        return replies[0].bound

    async def _step(self, state: graph_pb2.StateRecord, ledger: Ledger) -> trainer_pb2.StateResult:
        for worker in self._workers:
            worker.resident = None
        started = time.perf_counter()
        async with self._targets(STATE_KINDS, version=ledger.batch + 1) as targets:
            apply = rank_pb2.RankApply(
                denominator=ledger.counts.denominator(self._parts.config.loss.aggregation),
                num_updates=state.num_updates,
                targets=targets.for_ranks(),
            )
            replies = await self._command(rank_pb2.RankCommand(apply=apply))
            written = replies[0].written
            refs = await targets.seal(weights_hash=written.weights_hash)
        seconds = largest([reply.written.seconds for reply in replies])
        saving = time.perf_counter()
        await self._write(
            records.applied_state(
                self.claim,
                refs,
                weights_hash=written.weights_hash,
                ledger=ledger,
                num_updates=state.num_updates + ("skipped" not in written.metrics),
                metrics=written.metrics,
            ),
            Ledger(batch=ledger.batch + 1),
        )
        seconds["save"] = time.perf_counter() - saving
        seconds["total"] = time.perf_counter() - started
        for worker in self._workers:
            worker.resident = (refs["master"].key, refs["moments"].key)
        return trainer_pb2.StateResult(state=self._state, metrics=written.metrics, seconds=seconds)

    async def _save(self) -> trainer_pb2.StateResult:
        assert self._state is not None, "a binding has a state"
        if self._ledger == self._saved_ledger:
            return trainer_pb2.StateResult(state=self._state)
        started = time.perf_counter()
        ledger = self._ledger
        kinds = ("gradients",) if ledger.added else ()
        self._num_saves += 1
        async with (
            self._all_or_lost(),
            self._targets(kinds, version=ledger.batch, number=self._num_saves) as targets,
        ):
            if kinds:
                export = rank_pb2.RankExport(targets=targets.for_ranks())
                await self._command(rank_pb2.RankCommand(export=export))
            refs = await targets.seal()
            await self._write(
                records.with_sum(self._state, self.claim, ledger, refs.get("gradients")), ledger
            )
        return trainer_pb2.StateResult(
            state=self._state, seconds={"save": time.perf_counter() - started}
        )

    async def _write(self, state: graph_pb2.StateRecord, ledger: Ledger) -> None:
        """The one write that makes state and ledger true together."""
        self._check_claimed()
        await self._parts.store.save_state(self.claim.key.run_id, state)
        self._state = state
        self._ledger = self._saved_ledger = ledger

    @property
    def _workers(self) -> tuple[Worker, ...]:
        return self._parts.workers

    async def _command(
        self, first: rank_pb2.RankCommand, *others: rank_pb2.RankCommand
    ) -> list[rank_pb2.RankReply]:
        """Sends one command to every rank, or each rank its own; waits for all of them.

        Ranks wait for each other in collectives, so when one fails the others are ended, too.
        """
        self._check_claimed()
        if len(self._workers) == 1:
            timeout_s = self._parts.command_timeout_s
            return [await self._workers[0].call(first, timeout_s=timeout_s)]
        each = [first, *others] if others else _copies(first, len(self._workers))
        tasks = [
            asyncio.ensure_future(worker.call(command, timeout_s=self._parts.command_timeout_s))
            for worker, command in zip(self._workers, each, strict=True)
        ]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            # A refusal is the same on all ranks; give them the time to say so.
            _, pending = await asyncio.wait(pending, timeout=_REFUSAL_GRACE_S)
        if pending:
            for worker in self._workers:
                worker.kill()
        await asyncio.wait(tasks)
        # What failed first is the cause; the others may have failed for want of it.
        for task in (*done, *tasks):
            error = task.exception()
            if error is not None:
                raise error
        return [task.result() for task in tasks]

    @asynccontextmanager
    async def _at_work(self, activity: str, **args: str | int) -> AsyncIterator[None]:
        """Waits for this operation's turn (freed by the end of the one before); then works."""
        if self._waiting >= self._parts.max_queued:
            raise DomainError(
                ErrorReason.QUEUE_FULL, f"{self.claim.key}: {self._waiting} operations wait"
            )
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        started = time.time()
        self.activity = activity
        try:
            self._check_claimed()
            yield
        except DomainError as error:
            if error.reason is ErrorReason.TERM_STALE:
                self.lose()
            raise
        finally:
            self.activity = ""
            self._turn.release()
            for slot in self.claim.slots:
                self._parts.spans.add(
                    f"slot/{slot}",
                    f"{self.claim.key.policy} {activity}",
                    started,
                    time.time(),
                    policy=self.claim.key.policy,
                    run=self.claim.key.run_id,
                    **args,
                )

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

    @asynccontextmanager
    async def _targets(
        self, kinds: Sequence[str], *, version: int, number: int | None = None
    ) -> AsyncIterator[StateTargets]:
        targets = await self._parts.segments.allocate(
            kinds, self._parameters, version=version, number=number
        )
        try:
            yield targets
        finally:
            targets.abandon()

    def _trained_state(self) -> graph_pb2.StateRecord:
        assert self._state is not None, "a binding has a state"
        if self._parts.config.kind == "frozen":
            raise DomainError(
                ErrorReason.STATE_TRANSITION_REFUSED,
                f"policy {self.claim.key.policy} is frozen: it has no gradients",
            )
        return self._state

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


def _copies(command: rank_pb2.RankCommand, count: int) -> list[rank_pb2.RankCommand]:
    copies = []
    for _ in range(count):
        copy = rank_pb2.RankCommand()
        copy.CopyFrom(command)
        copies.append(copy)
    return copies
