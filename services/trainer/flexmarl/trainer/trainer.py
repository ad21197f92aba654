"""The trainer's room: runs, bindings, slots. Handlers of the servicer, in domain terms."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.trainer.v1 import trainer_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.process_groups import check_meeting_place
from flexmarl.core.seeds import derive
from flexmarl.core.state_paths import StatePath
from flexmarl.core.trainer_slots import Claim, PolicyKey, SlotTable
from flexmarl.runtime.aio import Background
from flexmarl.runtime.children import Children
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.spans import SpanRecorder
from flexmarl.trainer.binding import Binding
from flexmarl.trainer.binding_parts import BindingParts, PassBudget
from flexmarl.trainer.borrowing import Borrowed
from flexmarl.trainer.config import TrainerConfig
from flexmarl.trainer.keepers import Keepers
from flexmarl.trainer.lenders import Lenders
from flexmarl.trainer.lending import Loan, LoanParts, first_word
from flexmarl.trainer.open_run import OpenRun, read_run
from flexmarl.trainer.operations import Operations
from flexmarl.trainer.pool import WorkerPool
from flexmarl.trainer.rank_group import RankGroup
from flexmarl.trainer.run_end import end_run
from flexmarl.trainer.segments import SegmentNames, StateSegments
from flexmarl.trainer.state_layout import MOMENTS
from flexmarl.trainer.totals import Totals

_log = get_logger(__name__)


class Trainer:
    """Runs, bindings and slots of one trainer.

    Attributes:
        totals: Running sums since its start.

    Args:
        config: Configuration.
        children: Starts worker processes.
        background: Owns tasks.
        operations: Those that are under way.
        spans: Timeline.
    """

    def __init__(
        self,
        config: TrainerConfig,
        children: Children,
        background: Background,
        *,
        operations: Operations,
        spans: SpanRecorder,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self.totals = Totals()
        self._config = config
        self._background = background
        self._operations = operations
        self._spans = spans
        self._runs: dict[str, OpenRun] = {}
        self._run_locks: dict[str, asyncio.Lock] = {}
        self._table = SlotTable(config.slots)
        self._budgets: dict[PolicyKey, PassBudget] = {}
        self._bindings: dict[PolicyKey, Binding] = {}
        self._loans: dict[PolicyKey, Loan] = {}
        self._left: dict[PolicyKey, tuple[str, ...]] = {}
        self._paths = config.state_paths()
        self._lenders = Lenders(config, background)
        self._pool = WorkerPool(config, children, background, on_death=self._worker_died)

    async def wait_ready(self) -> None:
        """Waits until all workers are warm.

        Raises:
            DomainError: NOT_READY.
        """
        await self._pool.wait_ready()

    async def open_run(
        self, run_id: str, *, term: int, shards: Sequence[common_pb2.ShardAddress]
    ) -> trainer_pb2.OpenRunResponse:
        """Reads a run's config and brings its models here; again with a newer term is fine.

        Raises:
            DomainError: TERM_STALE, INVALID_ARGUMENT without shards, and what the store answers.
        """
        async with self._run_locks.setdefault(run_id, asyncio.Lock()):
            run = self._runs.get(run_id)
            if run is not None:
                run.check_term(term)
                run.term = term
            else:
                self._runs[run_id] = await read_run(
                    run_id, term=term, shards=shards, config=self._config
                )
        return trainer_pb2.OpenRunResponse(incarnation=self.incarnation, slots=self._config.slots)

    async def close_run(self, run_id: str, *, term: int) -> None:
        """Ends all that a run has here; nothing is saved, an unknown run is closed already.

        Work under way is awaited for `close_grace_s` and then ended; it holds nothing afterwards.

        Raises:
            DomainError: TERM_STALE.
        """
        async with self._run_locks.setdefault(run_id, asyncio.Lock()):
            run = self._runs.get(run_id)
            if run is None:
                return
            run.check_term(term)
            for claim in self._table.claims_of_run(run_id):
                self._holder(claim.key).lose()
            self._table.forget_run(run_id)
            self._budgets = {key: b for key, b in self._budgets.items() if key.run_id != run_id}
            self._left = {key: s for key, s in self._left.items() if key.run_id != run_id}
            del self._runs[run_id]
            # Who asked for it may go away meanwhile; what is begun here is brought to its end.
            await asyncio.shield(self._end(run, grace_s=self._config.close_grace_s))
        self._run_locks.pop(run_id, None)

    async def bind(
        self,
        run_id: str,
        policy: str,
        *,
        term: int,
        slots: Sequence[str],
        version: int | None,
        beyond: Sequence[trainer_pb2.TrainerSlots] = (),
    ) -> trainer_pb2.BindPolicyResult:
        """Binds a policy; an older binding of it ends unsaved.

        Raises:
            DomainError: See `Lenders.borrow`, `SlotTable.claim`, `Binding.borrow`, `Binding.bind`.
        """
        run = self._run(run_id)
        world_size = len(slots) + sum(len(others.slots) for others in beyond)
        run.check_policy(policy, world_size=world_size)
        key = PolicyKey(run_id, policy)
        borrowed = self._lenders.borrow(key, beyond, term=term, num_near=len(slots))
        claim = self._claim(key, term=term, slots=slots)
        binding = self._bindings[key] = Binding(self._parts(run, claim, borrowed))
        workers = [self._pool.workers[slot] for slot in claim.slots]
        try:
            for worker in workers:
                await worker.wait_ready(timeout_s=self._config.warm_timeout_s)
            if borrowed:
                await binding.borrow()
                meeting = await self._pool.meet_others(_meeting_name(claim))
            else:
                meeting = await self._pool.meet(workers)
            keepers = None if borrowed else await self._keepers(claim)
        except BaseException:
            binding.lose()
            raise
        result = await binding.bind(meeting=meeting, version=version, keepers=keepers)
        self._paths.loaded(result.loaded_bytes, seconds=result.seconds.get("load", 0.0))
        return result

    async def lend(
        self,
        requests: AsyncIterator[trainer_pb2.LendSlotsRequest],
        say: Callable[[trainer_pb2.LendSlotsResponse], Awaitable[None]],
    ) -> None:
        """Lends slots for as long as this runs; an older binding of the policy here ends unsaved.

        Args:
            requests: What the leading trainer says.
            say: Says something to it.

        Raises:
            DomainError: See `first_word`, `check_meeting_place`, `SlotTable.claim` and
                `Loan.serve`.
        """
        config = self._config
        borrow = await first_word(requests, silence_s=config.peer_silence_s)
        check_meeting_place(config.rendezvous_host, peers=[f"{borrow.rendezvous_host}:0"])
        run = self._run(borrow.run_id)
        run.check_policy(borrow.policy, world_size=borrow.world_size)
        claim = self._claim(
            PolicyKey(run.run_id, borrow.policy), term=borrow.term, slots=borrow.slots
        )
        loan = self._loans[claim.key] = Loan(self._loan_parts(run, claim, borrow))
        await loan.serve(requests, say)

    def end_loans(self) -> None:
        """Takes back all that is lent: the trainer stops."""
        for loan in [*self._loans.values()]:
            loan.lose(DomainError(ErrorReason.DRAINING, "the trainer stops"))

    async def prefetch(
        self, run_id: str, policy: str, *, slots: Sequence[str]
    ) -> trainer_pb2.PrefetchResult:
        """Loads a policy's newest saved state into memory of slots that nobody uses.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT for an unknown policy or slot, and what the
                store or a worker answers.
        """
        run = self._run(run_id)
        run.check_policy(policy, world_size=len(slots))
        self._table.check_slots(slots)
        state = await run.store.get_state(run_id, policy)
        if state is None or not state.HasField("master"):
            return trainer_pb2.PrefetchResult()
        ranks = self._ranks(run, slots)
        async with self._segments(run, policy, term=0).opened(
            {"master": state.master, "moments": state.moments}
        ) as segments:
            return await ranks.prefetch(segments)

    def binding(self, run_id: str, policy: str, *, term: int) -> Binding:
        """Returns the binding of a policy under a term.

        Raises:
            DomainError: TERM_STALE, STATE_TRANSITION_REFUSED when it is not bound here.
        """
        key = PolicyKey(run_id, policy)
        self._table.check(key, term=term)
        if key not in self._bindings:
            raise DomainError(
                ErrorReason.STATE_TRANSITION_REFUSED,
                f"{key} has slots here under term {term}, and another trainer leads it: ask that",
                {"policy": policy, "term": str(term)},
            )
        return self._bindings[key]

    def fetch(
        self, run_id: str, rows: Sequence[common_pb2.VertexRef]
    ) -> Coroutine[None, None, Sequence[graph_pb2.Vertex]]:
        """Returns a reader of rows, in order, from the shards that hold them."""
        return self._run(run_id).store.get_vertices(run_id, rows)

    def starts(self) -> dict[str, int]:
        """Workers that became warm so far, by slot."""
        return {slot: worker.generation for slot, worker in self._pool.workers.items()}

    def status(self) -> trainer_pb2.TrainerStatus:
        """Returns slots and what they do; the clock is the servicer's."""
        return trainer_pb2.TrainerStatus(
            incarnation=self.incarnation,
            slots=[self._slot_status(slot) for slot in self._config.slots],
            ready=self._pool.ready,
        )

    async def close(self) -> None:
        """Ends what is under way and closes connections; the workers end with their owner."""
        await asyncio.gather(*(self._end(run, grace_s=0.0) for run in self._runs.values()))
        await self._lenders.close()

    def _end(self, run: OpenRun, *, grace_s: float) -> asyncio.Task[None]:
        work = self._operations.of_run(run.run_id)
        return self._background.start(f"end of {run.run_id}", end_run(run, work, grace_s=grace_s))

    def _slot_status(self, slot: str) -> trainer_pb2.SlotStatus:
        worker = self._pool.workers[slot]
        status = trainer_pb2.SlotStatus(slot=slot, pid=worker.pid, busy_s=worker.busy_seconds())
        claim = self._table.holder(slot)
        if claim is not None:
            holder = self._holder(claim.key)
            status.run_id, status.policy = claim.key.run_id, claim.key.policy
            status.term = claim.term
            status.activity = holder.activity
            status.state_bytes = holder.state_bytes
        return status

    def _worker_died(self, slot: str) -> None:
        claim = self._table.holder(slot)
        if claim is None:
            return
        _log.warning("binding_lost", policy=str(claim.key), slot=slot)
        holder = self._holder(claim.key)
        if isinstance(holder, Loan):
            pid = self._pool.workers[slot].pid
            died = f"the worker of slot {slot} (pid {pid}) died"
            holder.lose(DomainError(ErrorReason.CHILD_DIED, died, {"slot": slot, "pid": str(pid)}))
        else:
            holder.lose()

    def _holder(self, key: PolicyKey) -> Binding | Loan:
        """What a claim here is for: a policy is bound, or its slots are lent."""
        loan = self._loans.get(key)
        return self._bindings[key] if loan is None else loan

    def _claim(self, key: PolicyKey, *, term: int, slots: Sequence[str]) -> Claim:
        """Claims slots for a policy; what it has here under an older term ends."""
        older = self._table.claim(key, term=term, slots=slots)
        if older is not None:
            self._holder(key).lose()
            self._forget(key)
        return self._table.check(key, term=term)

    async def _keepers(self, claim: Claim) -> Keepers | None:
        """Slots that the policy left for these, if its state is to come from there."""
        left = self._left.get(claim.key, ())
        if left == claim.slots or len(left) != len(claim.slots):
            return None
        choice = self._paths.choose()
        _log.debug("state_path", policy=str(claim.key), path=choice.path, why=choice.reason)
        if choice.path is not StatePath.DEVICE:
            return None
        return Keepers(
            workers=[
                None if slot == own else self._pool.workers[slot]
                for slot, own in zip(left, claim.slots, strict=True)
            ],
            meeting=await self._pool.meet_in_pairs(_meeting_name(claim)),
        )

    def _lost(self, claim: Claim) -> None:
        self._left[claim.key] = claim.slots
        self._pool.part(_meeting_name(claim))
        # A successor's claim may have taken the policy's place already: then nothing is ours.
        if self._table.release(claim):
            self._forget(claim.key)

    def _forget(self, key: PolicyKey) -> None:
        self._bindings.pop(key, None)
        self._loans.pop(key, None)

    def _loan_parts(self, run: OpenRun, claim: Claim, borrow: trainer_pb2.Borrow) -> LoanParts:
        config = self._config
        return LoanParts(
            claim=claim,
            first_rank=borrow.first_rank,
            world_size=borrow.world_size,
            model_path=str(run.models[borrow.policy]),
            package_path=run.package_path(borrow.policy),
            workers=[self._pool.workers[slot] for slot in claim.slots],
            kept_groups=self._pool.kept_groups,
            warm_timeout_s=config.warm_timeout_s,
            command_timeout_s=config.command_timeout_s,
            silence_s=config.peer_silence_s,
            cold_start=config.cold_start,
            spans=self._spans,
            background=self._background,
            on_lost=self._lost,
        )

    def _ranks(
        self, run: OpenRun, slots: Sequence[str], borrowed: Sequence[Borrowed] = ()
    ) -> RankGroup:
        ranks = RankGroup(
            [self._pool.workers[slot] for slot in slots],
            [rank for others in borrowed for rank in others.ranks],
            command_timeout_s=self._config.command_timeout_s,
        )
        run.ranks.add(ranks)
        return ranks

    def _segments(self, run: OpenRun, policy: str, *, term: int) -> StateSegments:
        config = run.config.policies[policy]
        return StateSegments(
            run.store,
            SegmentNames(
                run_id=run.run_id, created_unix_ns=run.created_unix_ns, policy=policy, term=term
            ),
            tier=config.trainer.tier,
            weights_dtype=config.rollout.dtype,
            moments=MOMENTS[config.optimizer.kind],
            traffic=self.totals.traffic_of(policy),
            verify=self._config.verify_swaps,
        )

    def _parts(self, run: OpenRun, claim: Claim, borrowed: Sequence[Borrowed]) -> BindingParts:
        policy = claim.key.policy
        config = run.config.policies[policy]
        return BindingParts(
            claim=claim,
            config=config,
            model_path=str(run.models[policy]),
            model_hash=run.model_hashes[policy],
            package_path=run.package_path(policy),
            init_seed=derive(run.config.seed, "init", policy),
            ranks=self._ranks(run, claim.slots, borrowed),
            borrowed=borrowed,
            store=run.store,
            segments=self._segments(run, policy, term=claim.term),
            budget=self._budgets.setdefault(claim.key, PassBudget()),
            spans=self._spans,
            totals=self.totals,
            max_queued=self._config.max_queued_per_policy,
            cold_start=self._config.cold_start,
            on_lost=self._lost,
        )

    def _run(self, run_id: str) -> OpenRun:
        run = self._runs.get(run_id)
        if run is None:
            raise DomainError(
                ErrorReason.RUN_NOT_FOUND,
                f"run {run_id} is not open on this trainer",
                {"run": run_id},
            )
        return run


def _meeting_name(claim: Claim) -> str:
    """Where workers meet for this binding alone."""
    return f"{claim.key}/{claim.term}"
