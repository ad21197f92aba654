"""The dispatcher's handlers: which run is open, under which term."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.common.v1.common_pb2 import ShardAddress
from flexmarl.api.meg_store.v1.graph_pb2 import Manifest, PolicyManifest
from flexmarl.api.rollout.v1.rollout_pb2 import RewardScope, RolloutStatus, SampleSpec
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.dispatcher.checks import check_policies, check_spec
from flexmarl.rollout.dispatcher.run import Run
from flexmarl.rollout.dispatcher.status import run_status
from flexmarl.runtime.logging import get_logger

_log = get_logger(__name__)

_OVER = (
    common_pb2.RUN_STATUS_FINISHED,
    common_pb2.RUN_STATUS_STOPPED,
    common_pb2.RUN_STATUS_FAILED,
)


class Rollout:
    """All that the dispatcher's RPCs do; one run is open at a time.

    Args:
        opener: Prepares a run: reads it, unpacks it, starts its workers.
    """

    def __init__(self, opener: Callable[[str, list[ShardAddress], int], Awaitable[Run]]) -> None:
        self.incarnation = uuid.uuid4().hex
        self._opener = opener
        self._run: Run | None = None
        self._opening = asyncio.Lock()

    @property
    def run(self) -> Run | None:
        """The open run."""
        return self._run

    async def open_run(self, run_id: str, shards: Iterable[ShardAddress], term: int) -> str:
        """Opens a run, or takes it over under a newer term.

        Returns:
            The dispatcher's incarnation.

        Raises:
            DomainError: TERM_STALE; NOT_BUILT while another run is open; what opening a run raises.
        """
        shards = list(shards)
        if not shards:
            raise DomainError(ErrorReason.INVALID_ARGUMENT, "shards: name the run's home shard")
        async with self._opening:
            if self._run is not None and self._run.run_id != run_id:
                await self._close_if_over(self._run, run_id)
            elif self._run is not None and self._run.fatal is not None and term > self._run.term:
                # Resumed after what ended it was mended: from the start, nothing is carried over.
                run, self._run = self._run, None
                await run.close()
            if self._run is None:
                _log.info("run_opens", run=run_id, term=term)
                self._run = await self._opener(run_id, shards, term)
            else:
                self._take_over(self._run, term)
        return self.incarnation

    async def close_run(self, run_id: str, term: int) -> None:
        """Ends workers and instances of a run; one that is not open is closed already."""
        async with self._opening:
            run = self._run
            if run is None or run.run_id != run_id:
                return
            _check_term(run, term)
            self._run = None
            await run.close()
            _log.info("run_closed", run=run_id)

    def start_samples(self, run_id: str, term: int, specs: Iterable[SampleSpec]) -> str:
        """Admits samples; all, or none where one cannot be."""
        run, specs = self._get(run_id, term), list(specs)
        for spec in specs:
            check_spec(spec)
        run.start_samples(specs)
        return self.incarnation

    async def cancel_samples(self, run_id: str, term: int, sample_ids: Iterable[str]) -> None:
        """Cuts samples, also those that a dispatcher before this one had.

        Raises:
            DomainError: UNAVAILABLE, until a run is open: whoever cuts samples opens it again, and
                ends their groups once this is answered.
        """
        if self._run is None:
            raise DomainError(
                ErrorReason.UNAVAILABLE,
                f"run {run_id!r} is not open here yet: its samples are cut when it is",
                {"run": run_id},
            )
        await self._get(run_id, term).cancel_samples(sample_ids)

    async def compute_advantages(
        self, run_id: str, term: int, group_id: str, scopes: Sequence[RewardScope]
    ) -> Sequence[RewardScope]:
        """Asks the run's own estimator about a group.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE; ADVANTAGE_RAISED; INVALID_ARGUMENT.
        """
        run = self._get(run_id, term)
        if not run.config.advantage.rule().is_own or not scopes:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                "scopes: only a run's own estimator is asked, about one scope at least",
            )
        return await run.advantages(group_id, scopes)

    def prepare_weights(
        self, run_id: str, term: int, version: int, policies: dict[str, PolicyManifest]
    ) -> None:
        """Announces weights."""
        run = self._get(run_id, term)
        check_policies(policies, run.config.policies)
        run.announce(version, policies)

    def activate_version(self, run_id: str, term: int, manifest: Manifest) -> None:
        """Makes a committed version the one to sample under."""
        run = self._get(run_id, term)
        check_policies(manifest.policies, run.config.policies)
        missing = sorted(run.config.policies.keys() - manifest.policies.keys())
        if missing:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"manifest.policies: version {manifest.version} has no weights of {missing[0]!r}",
            )
        run.activate(manifest)

    def status(self, run_id: str) -> RolloutStatus:
        """Status of a run.

        Raises:
            DomainError: RUN_NOT_FOUND.
        """
        if self._run is None or self._run.run_id != run_id:
            raise _not_open(run_id)
        return run_status(self._run, self.incarnation)

    async def close(self) -> None:
        """Closes what is open."""
        async with self._opening:
            run, self._run = self._run, None
            if run is not None:
                await run.close()

    def _get(self, run_id: str, term: int) -> Run:
        run = self._run
        if run is None or run.run_id != run_id:
            raise _not_open(run_id)
        _check_term(run, term)
        self._take_over(run, term)
        return run

    def _take_over(self, run: Run, term: int) -> None:
        _check_term(run, term)
        if term > run.term:
            _log.info("run_taken_over", run=run.run_id, term=term, before=run.term)
            run.term = term
            run.fleet.send_plan()

    async def _close_if_over(self, run: Run, wanted: str) -> None:
        status = (await run.store.get_run(run.run_id)).status
        if status not in _OVER:
            raise DomainError(
                ErrorReason.NOT_BUILT,
                f"run {wanted!r} cannot be opened beside run {run.run_id!r}: several runs at once "
                "on one cluster are not built; stop that run first",
                {"open_run": run.run_id},
            )
        self._run = None
        await run.close()


def _check_term(run: Run, term: int) -> None:
    if term < run.term:
        raise DomainError(
            ErrorReason.TERM_STALE,
            f"term {term} of run {run.run_id!r} is older than {run.term}",
            {"term": str(term), "current": str(run.term)},
        )


def _not_open(run_id: str) -> DomainError:
    return DomainError(
        ErrorReason.RUN_NOT_FOUND,
        f"run {run_id!r} is not open at this dispatcher",
        {"run": run_id},
    )
