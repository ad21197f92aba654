"""Opening a run: read it from its home shard, unpack it, build its parts, start its workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flexmarl.api.common.v1.common_pb2 import ShardAddress
from flexmarl.api.meg_store.v1.graph_pb2 import Run as RunRow
from flexmarl.api.rollout.v1.worker_pb2 import WorkerSetup
from flexmarl.client.bundle import materialise
from flexmarl.client.run_store import RunStore
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.placement import check_capacity
from flexmarl.rollout.config import RolloutConfig
from flexmarl.rollout.dispatcher.call_desk import CallDesk
from flexmarl.rollout.dispatcher.fleet import Fleet
from flexmarl.rollout.dispatcher.hosts import Hosts
from flexmarl.rollout.dispatcher.instances import InstanceBook
from flexmarl.rollout.dispatcher.mover import Mover
from flexmarl.rollout.dispatcher.rewards import RewardPool
from flexmarl.rollout.dispatcher.run import Run
from flexmarl.rollout.dispatcher.workers import WorkerPool
from flexmarl.rollout.dispatcher.writer import GraphWriter
from flexmarl.rollout.worker.confine import own_by_user
from flexmarl.runtime.aio import Background
from flexmarl.runtime.children import Children
from flexmarl.runtime.run_config import RunConfig
from flexmarl.runtime.spans import SpanRecorder


class RunOpener:
    """Builds runs; the only place that knows how their parts fit.

    Args:
        config: The service's config.
        hosts: Connected engine hosts.
        children: Starts workers.
        background: Owns their tasks.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        hosts: Hosts,
        children: Children,
        background: Background,
        record_trace: bool = False,
    ) -> None:
        self._config = config
        self._hosts = hosts
        self._children = children
        self._background = background
        self._record_trace = record_trace

    async def open(self, run_id: str, shards: list[ShardAddress], term: int) -> Run:
        """Opens a run.

        Raises:
            DomainError: RUN_NOT_FOUND, MODEL_INVALID, NOT_ENOUGH_INSTANCES, UNAVAILABLE.
        """
        patience_s = self._config.store_patience_s
        shard_patience_s = self._config.shard_patience_s
        store = RunStore.over(shards, patience_s=patience_s, shard_patience_s=shard_patience_s)
        try:
            row = await store.get_run(run_id)
            config = _parse(row)
            setup = await self._set_up(store, row)
            await self._wait_for_rooms(config)
            return self._build(store, row, config, setup, shards, term)
        except BaseException:
            await store.close()
            raise

    async def _wait_for_rooms(self, config: RunConfig) -> None:
        """Hosts that a dispatcher before this one had may be about to dial: they count, too."""
        wanted = {name: policy.rollout.instances for name, policy in config.policies.items()}
        try:
            check_capacity(wanted, self._hosts.rooms)
        except DomainError:
            await self._hosts.settled()

    async def _set_up(self, store: RunStore, row: RunRow) -> WorkerSetup:
        cache = self._config.data_dir / "cache"
        folder = await materialise(store, row.workflow_bundle, cache)
        # One after the other: policies often share a base model, and then one unpacks it.
        models = {name: await materialise(store, row.models[name], cache) for name in row.models}
        return WorkerSetup(
            run_id=row.run_id,
            workflow_path=str(folder.resolve()),
            config_json=row.config_json,
            model_paths={name: str(path.resolve()) for name, path in models.items()},
        )

    def _build(
        self,
        store: RunStore,
        row: RunRow,
        config: RunConfig,
        setup: WorkerSetup,
        shards: list[ShardAddress],
        term: int,
    ) -> Run:
        spans = SpanRecorder(service="rollout")
        run = Run(
            row.run_id,
            config=config,
            store=store,
            background=self._background,
            spans=spans,
            span_dir=self._config.data_dir / "spans" / row.run_id,
            settled=self._hosts.settled,
            max_crashes=self._config.worker_restarts,
        )
        run.term = term
        # Home and others are written together: the more patient one decides when rows are late.
        patience_s = self._config.store_patience_s
        if len(shards) > 1:
            patience_s = max(patience_s, self._config.shard_patience_s)
        writer = GraphWriter(
            store,
            run_id=row.run_id,
            term=lambda: run.term,
            on_trouble=run.trouble,
            patience_s=patience_s,
        )
        instances = InstanceBook()
        parts: dict[str, Any] = {"hosts": self._hosts, "instances": instances}
        fleet = Fleet(
            row.run_id,
            config=config,
            models=row.models,
            shards=shards,
            term=lambda: run.term,
            engine=self._config.engine,
            spans=spans,
            open_versions=run.flow.open_versions,
            **parts,
        )
        desk = CallDesk(
            config,
            writer=writer,
            listener=run.flow,
            seed=config.seed,
            record=self._record_trace,
            **parts,
        )
        workers = WorkerPool(
            self._children,
            setup=setup,
            num_workers=config.workflow.num_workers,
            max_samples=config.workflow.max_samples_per_worker,
            step_timeout_s=config.workflow.step_timeout_s,
            report_dir=self._report_dir(),
            log=self._config.log,
            limits=self._config.user_code,
            listener=run.flow,
        )
        mover = Mover(
            row.run_id,
            config.rollout.balance,
            desk=desk,
            fleet=fleet,
            spans=spans,
            open_versions=run.flow.open_versions,
        )
        rewards = RewardPool(
            self._children,
            setup=setup,
            num_processes=config.workflow.reward_workers,
            timeout_s=config.workflow.reward_timeout_s,
            log=self._config.log,
            limits=self._config.user_code,
            reward=config.workflow.reward,
            estimator=config.advantage.estimator if config.advantage.rule().is_own else None,
            counters=desk.counters,
            on_broken=run.flow.worker_ready,
        )
        run.wire(
            desk=desk, fleet=fleet, mover=mover, writer=writer, workers=workers, rewards=rewards
        )
        return run

    def _report_dir(self) -> Path:
        """Where the watchdogs of workers leave word."""
        folder = self._config.data_dir / "reports"
        folder.mkdir(parents=True, exist_ok=True)
        own_by_user(self._config.user_code, folder)
        return folder


def _parse(row: RunRow) -> RunConfig:
    try:
        return RunConfig.model_validate_json(row.config_json)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT, f"config of run {row.run_id!r}: {key}: {first['msg']}"
        ) from None
