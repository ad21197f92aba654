"""The trainer's room: runs, bindings, slots. Handlers of the servicer, in domain terms."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.meg_store.v1alpha1 import graph_pb2
from flexmarl.api.trainer.v1alpha1 import trainer_pb2
from flexmarl.client.bundle import materialise
from flexmarl.client.run_store import RunStore
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.seeds import derive
from flexmarl.core.trainer_slots import Claim, PolicyKey, SlotTable
from flexmarl.runtime.aio import Background
from flexmarl.runtime.children import Children
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.run_config import RunConfig
from flexmarl.runtime.spans import SpanRecorder
from flexmarl.trainer.binding import Binding
from flexmarl.trainer.binding_parts import BindingParts, PassBudget
from flexmarl.trainer.config import TrainerConfig
from flexmarl.trainer.pool import WorkerPool
from flexmarl.trainer.rank_group import RankGroup
from flexmarl.trainer.segments import SegmentNames, StateSegments
from flexmarl.trainer.state_layout import MOMENTS
from flexmarl.trainer.totals import Totals

_log = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class OpenRun:
    """A run that this trainer works for."""

    run_id: str
    created_unix_ns: int
    term: int
    config: RunConfig
    models: dict[str, Path]
    model_hashes: dict[str, str]
    package: Path | None
    store: RunStore


class Trainer:
    """Runs, bindings and slots of one trainer.

    Attributes:
        totals: Running sums since its start.

    Args:
        config: Configuration.
        children: Starts worker processes.
        background: Owns tasks.
        spans: Timeline.
    """

    def __init__(
        self,
        config: TrainerConfig,
        children: Children,
        background: Background,
        *,
        spans: SpanRecorder,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self.totals = Totals()
        self._config = config
        self._spans = spans
        self._runs: dict[str, OpenRun] = {}
        self._run_locks: dict[str, asyncio.Lock] = {}
        self._table = SlotTable(config.slots)
        self._budgets: dict[PolicyKey, PassBudget] = {}
        self._bindings: dict[PolicyKey, Binding] = {}
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
                _check_run_term(run, term)
                run.term = term
            else:
                self._runs[run_id] = await self._read_run(run_id, term=term, shards=shards)
        return trainer_pb2.OpenRunResponse(incarnation=self.incarnation, slots=self._config.slots)

    async def close_run(self, run_id: str, *, term: int) -> None:
        """Ends all that a run has here; nothing is saved, an unknown run is closed already.

        Raises:
            DomainError: TERM_STALE.
        """
        async with self._run_locks.setdefault(run_id, asyncio.Lock()):
            run = self._runs.get(run_id)
            if run is None:
                return
            _check_run_term(run, term)
            for claim in self._table.claims_of_run(run_id):
                self._bindings[claim.key].lose()
            self._table.forget_run(run_id)
            self._budgets = {key: b for key, b in self._budgets.items() if key.run_id != run_id}
            del self._runs[run_id]
            await run.store.close()
        self._run_locks.pop(run_id, None)

    async def bind(
        self, run_id: str, policy: str, *, term: int, slots: Sequence[str], version: int | None
    ) -> trainer_pb2.BindPolicyResult:
        """Binds a policy; an older binding of it ends unsaved.

        Raises:
            DomainError: See `SlotTable.claim` and `Binding.bind`.
        """
        run = self._run(run_id)
        key = PolicyKey(run_id, policy)
        self._check_policy(run, policy, slots)
        older = self._table.claim(key, term=term, slots=slots)
        if older is not None:
            self._bindings[key].lose()
        claim = self._table.check(key, term=term)
        binding = self._bindings[key] = Binding(self._parts(run, claim))
        workers = [self._pool.workers[slot] for slot in claim.slots]
        try:
            for worker in workers:
                await worker.wait_ready(timeout_s=self._config.warm_timeout_s)
            meeting = await self._pool.meet(workers)
        except BaseException:
            binding.lose()
            raise
        return await binding.bind(meeting=meeting, version=version)

    async def prefetch(
        self, run_id: str, policy: str, *, slots: Sequence[str]
    ) -> trainer_pb2.PrefetchResult:
        """Loads a policy's newest saved state into memory of slots that nobody uses.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT for an unknown policy or slot, and what the
                store or a worker answers.
        """
        run = self._run(run_id)
        self._check_policy(run, policy, slots)
        self._table.check_slots(slots)
        state = await run.store.get_state(run_id, policy)
        if state is None or not state.HasField("master"):
            return trainer_pb2.PrefetchResult()
        ranks = self._ranks(slots)
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
        """Closes store connections; the workers end with their owner."""
        for run in self._runs.values():
            await run.store.close()

    def _slot_status(self, slot: str) -> trainer_pb2.SlotStatus:
        worker = self._pool.workers[slot]
        status = trainer_pb2.SlotStatus(slot=slot, pid=worker.pid, busy_s=worker.busy_seconds())
        claim = self._table.holder(slot)
        if claim is not None:
            binding = self._bindings[claim.key]
            status.run_id, status.policy = claim.key.run_id, claim.key.policy
            status.term = claim.term
            status.activity = binding.activity
            status.state_bytes = binding.state_bytes
        return status

    def _worker_died(self, slot: str) -> None:
        claim = self._table.holder(slot)
        if claim is not None:
            _log.warning("binding_lost", policy=str(claim.key), slot=slot)
            self._bindings[claim.key].lose()

    def _lost(self, claim: Claim) -> None:
        # A successor's claim may have taken the policy's place already: then nothing is ours.
        if self._table.release(claim):
            del self._bindings[claim.key]

    def _ranks(self, slots: Sequence[str]) -> RankGroup:
        return RankGroup(
            [self._pool.workers[slot] for slot in slots],
            command_timeout_s=self._config.command_timeout_s,
        )

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
        )

    def _parts(self, run: OpenRun, claim: Claim) -> BindingParts:
        policy = claim.key.policy
        config = run.config.policies[policy]
        return BindingParts(
            claim=claim,
            config=config,
            model_path=str(run.models[policy]),
            model_hash=run.model_hashes[policy],
            package_path=str(run.package) if ":" in config.loss.kind else "",
            init_seed=derive(run.config.seed, "init", policy),
            ranks=self._ranks(claim.slots),
            store=run.store,
            segments=self._segments(run, policy, term=claim.term),
            budget=self._budgets.setdefault(claim.key, PassBudget()),
            spans=self._spans,
            totals=self.totals,
            max_queued=self._config.max_queued_per_policy,
            cold_start=self._config.cold_start,
            on_lost=self._lost,
        )

    async def _read_run(
        self, run_id: str, *, term: int, shards: Sequence[common_pb2.ShardAddress]
    ) -> OpenRun:
        store = RunStore.over(
            shards,
            patience_s=self._config.store_patience_s,
            shard_patience_s=self._config.shard_patience_s,
        )
        try:
            stored = await store.get_run(run_id)
            config = RunConfig.model_validate_json(stored.config_json)
            cache = self._config.data_dir / "models"
            models = {
                name: await materialise(store, ref, cache)
                for name, ref in sorted(stored.models.items())
            }
            package = None
            if any(":" in policy.loss.kind for policy in config.policies.values()):
                package = await materialise(
                    store, stored.workflow_bundle, self._config.data_dir / "packages"
                )
        except BaseException:
            await store.close()
            raise
        return OpenRun(
            run_id=run_id,
            created_unix_ns=stored.created_unix_ns,
            term=term,
            config=config,
            models=models,
            model_hashes={name: ref.content_hash for name, ref in stored.models.items()},
            package=package,
            store=store,
        )

    def _check_policy(self, run: OpenRun, policy: str, slots: Sequence[str]) -> None:
        config = run.config.policies.get(policy)
        if config is None or policy not in run.models:
            known = ", ".join(sorted(run.config.policies))
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"run {run.run_id} has no policy {policy!r}; it has: {known}",
                {"policy": policy},
            )
        if config.kind == "frozen" and len(slots) != 1:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"policy {policy} is frozen: bind it to one slot, not {len(slots)}",
                {"policy": policy},
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


def _check_run_term(run: OpenRun, term: int) -> None:
    if term < run.term:
        raise DomainError(
            ErrorReason.TERM_STALE,
            f"run {run.run_id}: orchestrator term {term} is older than {run.term}",
            {"term": str(term), "current": str(run.term)},
        )
