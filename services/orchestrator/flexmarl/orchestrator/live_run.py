"""One run in this process: from taking its term to its end, and what is told of it meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2 as pb
from flexmarl.client.enums import RUN_STATUS
from flexmarl.client.rollout import RolloutClient
from flexmarl.client.run_store import RunStore
from flexmarl.client.trainer import TrainerClient
from flexmarl.core.errors import DomainError
from flexmarl.core.fencing import ORCHESTRATOR_SCOPE
from flexmarl.core.run_effects import EndRun
from flexmarl.core.states import RunStatus
from flexmarl.core.training_rows import Row, RunFailure
from flexmarl.orchestrator.calls import TakenOverError, fenced
from flexmarl.orchestrator.config import OrchestratorConfig
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.convert import (
    cursor_of,
    dataset_name,
    failure_message,
    failure_of_error,
)
from flexmarl.orchestrator.driver import Driver
from flexmarl.orchestrator.last_evaluation import stored_evaluation
from flexmarl.orchestrator.progress import bounds_of, describe
from flexmarl.orchestrator.recovery import read_stored_run
from flexmarl.orchestrator.rollout_effects import RolloutEffects
from flexmarl.orchestrator.rules import parse_config
from flexmarl.orchestrator.shard_loss import lost_shard
from flexmarl.orchestrator.totals import Totals
from flexmarl.orchestrator.trainer_effects import TrainerEffects
from flexmarl.orchestrator.version_return import return_to_whole
from flexmarl.runtime.dataset import Queries, QueryFile, read_queries
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.run_config import RunConfig
from flexmarl.runtime.spans import SpanRecorder

_log = get_logger(__name__)

CLOSE_TIMEOUT_S: Final = 10.0
"""How long the end of a run waits for the other services to let go of it."""


class LiveRun:
    """A run that this process drives, or has driven.

    Args:
        run: The stored run.
        home: Its home shard, at the address that is right now.
        store: Client of its shards; closed with the run.
        config: Of the service.
        rollout: Client of the dispatcher.
        trainers: Clients of the trainers.
        spans: Recorder of the process.
        totals: Running sums of the process.
    """

    def __init__(
        self,
        run: graph_pb2.Run,
        home: common_pb2.ShardAddress,
        store: RunStore,
        *,
        config: OrchestratorConfig,
        rollout: RolloutClient,
        trainers: Sequence[TrainerClient],
        spans: SpanRecorder,
        totals: Totals,
    ) -> None:
        self.run_id = run.run_id
        self.home = home
        self.store = store
        self.taken_over = False
        self.ended = asyncio.Event()
        self._run = run
        self._run_config: RunConfig = parse_config(run.config_json)
        self._config = config
        self._clients = (rollout, tuple(trainers))
        self._spans = spans
        self._totals = totals
        self._context: RunContext | None = None
        self._driver: Driver | None = None
        self._stop: bool | None = None
        self._status: common_pb2.RunStatus.ValueType = common_pb2.RUN_STATUS_RUNNING
        self._failure: RunFailure | None = None
        self._version = 0
        self._recalled: tuple[pb.VersionReport, ...] = ()

    @property
    def reports(self) -> Sequence[pb.VersionReport]:
        """Reports of versions that no other process tells of, oldest first."""
        return self._recalled if self._context is None else self._context.reports

    @property
    def progress(self) -> pb.RunProgress:
        """Where the run stands."""
        progress = pb.RunProgress(
            run_id=self.run_id,
            status=self._status,
            version=self._version,
            num_versions=self._run_config.versions,
            stage="done" if self.ended.is_set() else "starting",
        )
        if self._failure is not None:
            progress.failure.CopyFrom(failure_message(self._failure))
        if self._context is not None and self._driver is not None:
            bounds = bounds_of(self._config, self._run_config)
            describe(progress, self._context, self._driver.core, bounds=bounds)
        elif not self.ended.is_set():
            what = f"store at {self.home.address}: read the run"
            progress.waits.append(what)
            patience = f"store_patience_s = {self._config.store_patience_s:g}"
            progress.reasons.add(what=what, ends=f"its answer; after {patience} the run fails")
        return progress

    def stop(self, *, finish_batch: bool) -> None:
        """Ask it to stop."""
        self._stop = finish_batch
        if self._driver is not None:
            self._driver.stop(finish_batch=finish_batch)

    async def recall(self) -> None:
        """Take a finished run as the store has it: nothing is driven.

        Raises:
            DomainError: UNAVAILABLE, the store does not answer.
        """
        self._status = self._run.status
        manifest = await self.store.get_manifest(self.run_id)
        if manifest is not None:
            self._version = manifest.version
            report = await stored_evaluation(
                self.store, self.run_id, self._run_config, version=manifest.version
            )
            self._recalled = () if report is None else (report,)
        self.ended.set()

    async def drive(self) -> None:
        """Drive the run until it ends, whatever happens; its last state is in the store then."""
        try:
            await self._finish(await self._drive())
        except TakenOverError as error:
            self.taken_over = True
            _log.warning("taken_over", run=self.run_id, why=str(error))
        except asyncio.CancelledError:
            raise  # the process stops: the run stays RUNNING and is taken up at the next start
        except Exception as error:  # noqa: BLE001 - the edge of a run: others must go on
            _log.exception("run_failed", run=self.run_id)
            await self._fail(failure_of_error(error))
        self.ended.set()

    async def _drive(self) -> EndRun:
        """Drive the run to its end; over fewer shards, and a new term, where one is lost."""
        while True:
            try:
                end = await self._drive_term()
            except DomainError as error:
                shard = lost_shard(self.store, reason=error.reason, metadata=error.metadata)
                if shard is None:
                    raise
            else:
                failure = end.failure or RunFailure(reason="", message="")
                shard = lost_shard(self.store, reason=failure.reason, metadata=failure.metadata)
                if shard is None:
                    return end
            await self._lose_shard(shard)

    async def _lose_shard(self, shard: str) -> None:
        _log.warning("shard_lost", run=self.run_id, shard=shard)
        # What the other services have under way may wait for it: they begin anew.
        await self._let_go()
        term = 0 if self._context is None else self._context.term
        with fenced():
            run = await self.store.lose_shard(self.run_id, shard, term=term)
        self.store.mark_lost(run.lost_shards)

    async def _drive_term(self) -> EndRun:
        term = await self.store.acquire_term(self.run_id, ORCHESTRATOR_SCOPE, holder="orchestrator")
        await self.store.update_run_status(
            self.run_id,
            common_pb2.RUN_STATUS_RUNNING,
            term=term,
            config_json=self._run.config_json,
            shards=self.store.addresses if self._run.shards else (),
        )
        context = RunContext(
            run_id=self.run_id,
            term=term,
            config=self._run_config,
            store=self.store,
            home=self.home,
            queries=Queries(),
            totals=self._totals,
        )
        known_rows: dict[str, tuple[Row, ...]] = {}
        if self._context is not None:
            context.reports = self._context.reports
        if self._driver is not None and self._driver.core.batch is not None:
            batch = self._driver.core.batch
            known_rows = {name: group.rows for name, group in batch.groups.items()}
        self._context, self._driver = context, None
        context.queries = await self._read_queries()
        await return_to_whole(context)
        stored = await read_stored_run(context, known_rows=known_rows)
        rollout, trainers = self._clients
        driver = Driver(
            context,
            stored,
            rollout=RolloutEffects(rollout, context),
            trainers={
                client.address: TrainerEffects(
                    client, context, operation_timeout_s=self._config.operation_timeout_s
                )
                for client in trainers
            },
            spans=self._spans,
            status_interval_s=self._config.status_interval_ms / 1000,
            confirm_term_s=self._config.confirm_term_s,
            cache_dir=self._config.data_dir / "models",
        )
        self._driver = driver
        if self._stop is not None:
            driver.stop(finish_batch=self._stop)
        _log.info(
            "run_driven",
            run=self.run_id,
            term=term,
            version=stored.version,
            cursor=str(cursor_of(context.manifest.cursor)) if context.manifest else "",
        )
        return await driver.drive()

    async def _read_queries(self) -> Queries:
        config, run = self._run_config, self._run
        dataset = await self._read_file(str(config.dataset.path), run.dataset.key)
        held_out = None
        if run.HasField("evaluation_dataset"):
            path = str(config.evaluation.path or config.dataset.path)
            held_out = await self._read_file(path, run.evaluation_dataset.key)
        return await asyncio.to_thread(read_queries, config, dataset, held_out)

    async def _read_file(self, path: str, key: str) -> QueryFile:
        return QueryFile(name=dataset_name(path, key), content=await self.store.get_object(key))

    async def _finish(self, end: EndRun) -> None:
        self._failure = end.failure
        await self._write_status(end.status, end.failure)
        await self._let_go()

    async def _fail(self, failure: RunFailure) -> None:
        self._failure = failure
        try:
            await self._write_status(RunStatus.FAILED, failure)
        except TakenOverError:
            self.taken_over = True
        except DomainError as error:
            # The store is away: it still says RUNNING, and the next start takes the run up.
            self._status = common_pb2.RUN_STATUS_FAILED
            _log.error("status_not_written", run=self.run_id, error=str(error))
        await self._let_go()

    async def _write_status(self, status: RunStatus, failure: RunFailure | None) -> None:
        term = 0 if self._context is None else self._context.term
        wire = RUN_STATUS.to_wire(status)
        with fenced():
            await self.store.update_run_status(
                self.run_id,
                wire,
                term=term,
                failure=None if failure is None else failure_message(failure),
            )
        self._status = wire

    async def _let_go(self) -> None:
        """Have the other services close the run; one that does not answer finds out by its term."""
        if self._driver is None or self.taken_over:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._driver.close_services()
        except TimeoutError:
            _log.warning("services_did_not_let_go", run=self.run_id)
