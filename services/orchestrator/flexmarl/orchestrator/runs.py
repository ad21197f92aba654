"""All runs of this process: submitting, resuming, stopping, deleting, watching."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2 as pb
from flexmarl.client.errors import NotFoundError
from flexmarl.client.rollout import RolloutClient
from flexmarl.client.run_store import RunStore
from flexmarl.client.trainer import TrainerClient
from flexmarl.core.errors import DomainError, ErrorReason, not_built
from flexmarl.orchestrator.config import OrchestratorConfig
from flexmarl.orchestrator.live_run import LiveRun
from flexmarl.orchestrator.moved_shards import moved_shards
from flexmarl.orchestrator.owned_runs import OwnedRun, OwnedRuns
from flexmarl.orchestrator.rules import check_changes, parse_config
from flexmarl.orchestrator.totals import Totals
from flexmarl.runtime.aio import Background
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.spans import SpanRecorder

_log = get_logger(__name__)

MAX_ENDED: Final = 32
"""Ended runs that can still be asked about without their store's address."""

STOP_TIMEOUT_S: Final = 15.0
_ENDED: Final = frozenset(
    {
        common_pb2.RUN_STATUS_FINISHED,
        common_pb2.RUN_STATUS_FAILED,
        common_pb2.RUN_STATUS_STOPPED,
    }
)


class Runs:
    """The runs that this process drives or has driven; one at a time is driven.

    Attributes:
        totals: Running sums over all of them.

    Args:
        config: Of the service.
        background: Owner of the runs' tasks.
        rollout: Client of the dispatcher.
        trainers: Clients of the trainers.
        spans: Recorder of the process.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        background: Background,
        *,
        rollout: RolloutClient,
        trainers: Sequence[TrainerClient],
        spans: SpanRecorder,
    ) -> None:
        self.totals = Totals()
        self._config = config
        self._background = background
        self._rollout = rollout
        self._trainers = trainers
        self._spans = spans
        self._owned = OwnedRuns(config.data_dir)
        self._runs: OrderedDict[str, LiveRun] = OrderedDict()
        self._lock = asyncio.Lock()
        self._closing = False

    async def take_up(self) -> None:
        """Go on with the runs of the last process; one that cannot be read is left and logged."""
        for owned in self._owned.read():
            home = common_pb2.ShardAddress(name=owned.shard, address=owned.address)
            try:
                await self.begin(owned.run_id, home, resume=True)
            except DomainError as error:
                _log.warning("run_not_taken_up", run=owned.run_id, error=str(error))

    async def begin(
        self,
        run_id: str,
        home: common_pb2.ShardAddress,
        *,
        resume: bool,
        config_json: bytes = b"",
    ) -> pb.RunProgress:
        """Start to drive a run, with other settings if given; one that is driven is answered.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT, STATE_TRANSITION_REFUSED, NOT_BUILT.
        """
        async with self._lock:
            known = self._runs.get(run_id)
            if known is not None and not known.ended.is_set():
                return known.progress
            await self._refuse_second(run_id)
            store = RunStore.over([home], patience_s=self._config.store_patience_s)
            try:
                live = await self._open(run_id, home, store, resume=resume, config_json=config_json)
            except BaseException:
                await store.close()
                raise
            if known is not None:
                await known.store.close()
            self._remember(live)
            return live.progress

    async def stop(self, run_id: str, *, finish_batch: bool) -> pb.RunProgress:
        """Stop a run; one that has ended is answered.

        Raises:
            DomainError: RUN_NOT_FOUND.
        """
        live = self._require(run_id)
        live.stop(finish_batch=finish_batch)
        if not finish_batch:
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await live.ended.wait()
            except TimeoutError:
                _log.warning("run_stops_slowly", run=run_id)
        return live.progress

    async def delete(self, run_id: str, home: common_pb2.ShardAddress) -> None:
        """Remove a run from all its store shards; one that is gone is fine.

        Raises:
            DomainError: STATE_TRANSITION_REFUSED while it is driven, here or elsewhere.
        """
        async with self._lock:
            live = self._runs.get(run_id)
            if live is not None and not await _has_ended(live):
                raise DomainError(
                    ErrorReason.STATE_TRANSITION_REFUSED,
                    f"run {run_id!r} is driven; stop it first: flexmarl stop {run_id} --now",
                    {"run": run_id},
                )
            store = RunStore.over([home], patience_s=self._config.store_patience_s)
            try:
                await self._delete(run_id, home, store)
            finally:
                await store.close()
            self._owned.remove(run_id)
            if live is not None:
                del self._runs[run_id]
                await live.store.close()

    def progress(self, run_id: str) -> pb.RunProgress:
        """Where a run stands.

        Raises:
            DomainError: RUN_NOT_FOUND.
        """
        return self._require(run_id).progress

    def newest(self) -> pb.RunProgress | None:
        """Where the run stands that was taken up last."""
        live = next(reversed(self._runs.values()), None)
        return None if live is None else live.progress

    async def watch(
        self, run_id: str, *, from_version: int, interval_s: float
    ) -> AsyncIterator[pb.WatchProgressResponse]:
        """Reports and states until the run has ended.

        Waits `interval_s` between two states; freed early by the end of the run.

        Raises:
            DomainError: RUN_NOT_FOUND; TERM_STALE when another orchestrator took the run over.
        """
        live = self._require(run_id)
        reports = await self._stored_reports(live, from_version)
        upcoming = reports[-1].version + 1 if reports else from_version
        while True:
            ended = live.ended.is_set()
            # Ended and still not told: the reports that came between the two are taken below.
            fresh = [report for report in live.reports if report.version >= upcoming]
            if fresh and fresh[0].version > upcoming:
                fresh = await self._stored_reports(live, upcoming)
            reports.extend(fresh)
            upcoming = reports[-1].version + 1 if reports else upcoming
            yield pb.WatchProgressResponse(reports=reports, progress=live.progress)
            reports = []
            if ended:
                break
            try:
                async with asyncio.timeout(interval_s):
                    await live.ended.wait()
            except TimeoutError:
                if self._closing:
                    return
        if live.taken_over:
            raise DomainError(
                ErrorReason.TERM_STALE,
                f"run {run_id!r} was taken over by another orchestrator",
                {"run": run_id},
            )

    async def close(self) -> None:
        """Have streams of progress end at their next state: the process stops."""
        self._closing = True

    async def _open(
        self,
        run_id: str,
        home: common_pb2.ShardAddress,
        store: RunStore,
        *,
        resume: bool,
        config_json: bytes,
    ) -> LiveRun:
        run = await store.get_run(run_id)
        # The home shard is where it answers now; the others are where they were last.
        others: Sequence[common_pb2.ShardAddress] = run.shards[1:]
        if config_json:
            check_changes(run.config_json, config_json)
            addresses = parse_config(config_json).store_shards
            if addresses != parse_config(run.config_json).store_shards:
                patience_s = self._config.store_patience_s
                others = await moved_shards(others, addresses, patience_s=patience_s)
            run.config_json = config_json  # stored once the run's term is held
        store.use_shards([home, *others], patience_s=self._config.shard_patience_s)
        live = LiveRun(
            run,
            home,
            store,
            config=self._config,
            rollout=self._rollout,
            trainers=self._trainers,
            spans=self._spans,
            totals=self.totals,
        )
        if run.status in _ENDED and not resume:
            raise DomainError(
                ErrorReason.STATE_TRANSITION_REFUSED,
                f"run {run_id!r} has ended before; resume it, or submit it under another id",
                {"run": run_id},
            )
        if run.status == common_pb2.RUN_STATUS_FINISHED:
            await live.recall()
            self._owned.remove(run_id)
            return live
        self._owned.add(OwnedRun(run_id, home.name, home.address))
        self._background.start(f"run {run_id}", self._drive(live))
        return live

    async def _delete(self, run_id: str, home: common_pb2.ShardAddress, store: RunStore) -> None:
        try:
            run = await store.get_run(run_id)
        except NotFoundError:
            return
        store.use_shards([home, *run.shards[1:]], patience_s=self._config.store_patience_s)
        await store.delete_run(run_id)

    async def _drive(self, live: LiveRun) -> None:
        await live.drive()
        self._owned.remove(live.run_id)

    async def _stored_reports(self, live: LiveRun, from_version: int) -> list[pb.VersionReport]:
        manifests = await live.store.list_manifests(live.run_id, from_version=from_version + 1)
        return [
            pb.VersionReport(
                version=manifest.version - 1,
                batch=manifest.batch,
                committed_unix_ns=manifest.committed_unix_ns,
            )
            for manifest in manifests
        ]

    async def _refuse_second(self, run_id: str) -> None:
        for other in list(self._runs.values()):
            # Whoever saw the last one's end may begin the next, though services let go of it still.
            if other.run_id != run_id and not await _has_ended(other):
                raise not_built(
                    f"several runs at once on one cluster: run {other.run_id!r} is driven here; "
                    f"wait for it or stop it, then start {run_id!r}; this"
                )

    def _remember(self, live: LiveRun) -> None:
        self._runs.pop(live.run_id, None)
        self._runs[live.run_id] = live
        ended = [run for run in self._runs.values() if run.ended.is_set() and run is not live]
        for old in ended[:-MAX_ENDED]:
            del self._runs[old.run_id]
            self._background.start(f"close store of {old.run_id}", old.store.close())

    def _require(self, run_id: str) -> LiveRun:
        live = self._runs.get(run_id)
        if live is None:
            raise DomainError(
                ErrorReason.RUN_NOT_FOUND,
                f"this orchestrator does not drive run {run_id!r}; resume it to have it driven",
                {"run": run_id},
            )
        return live


async def _has_ended(live: LiveRun) -> bool:
    """Whether nobody drives it any more; one that is ending is waited for, in bounds."""
    if live.progress.status == common_pb2.RUN_STATUS_RUNNING:
        return live.ended.is_set()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await live.ended.wait()
    except TimeoutError:
        return False
    return True
