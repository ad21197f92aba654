"""Writes versions of a run out as folders, beside its course: no batch waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from flexmarl.client.checkpoints import write_checkpoint
from flexmarl.core.checkpoints import CheckpointRule
from flexmarl.core.errors import DomainError
from flexmarl.core.run_effects import Commit
from flexmarl.core.run_events import EffectDone, Event
from flexmarl.orchestrator.context import RunContext
from flexmarl.runtime.aio import Background
from flexmarl.runtime.logging import get_logger

_log = get_logger(__name__)

FINISH_TIMEOUT_S: Final = 600.0
"""How long the end of a run waits for its last checkpoint."""


class Checkpoints:
    """One at a time; a version that comes due meanwhile waits, and a newer one takes its place.

    A checkpoint that cannot be written is told in the log and does not end the run: the weights are
    in the store, and `flexmarl export` writes them later.

    Args:
        context: The run.
        background: Owner of the writing.
        cache_dir: Where base models are unpacked.
    """

    def __init__(self, context: RunContext, background: Background, *, cache_dir: Path) -> None:
        self._context = context
        self._background = background
        self._cache_dir = cache_dir
        self._config = context.config.checkpoints
        self._rule = CheckpointRule(every=self._config.every, keep=self._config.keep)
        self._next: int | None = None
        self._writing: asyncio.Task[None] | None = None

    def resume(self, version: int) -> None:
        """Begin what the newest version makes due; a start before may have been cut in it."""
        self._begin([version])

    def observe(self, events: Iterable[Event]) -> None:
        """Begin what a commit makes due."""
        self._begin(
            event.effect.version
            for event in events
            if isinstance(event, EffectDone) and isinstance(event.effect, Commit)
        )

    def _begin(self, versions: Iterable[int]) -> None:
        if not self._config.every:
            return
        for version in versions:
            if self._rule.is_due(version, last=self._context.config.versions):
                self._next = version
        if self._next is not None and (self._writing is None or self._writing.done()):
            self._writing = self._background.start("checkpoint", self._write())

    async def finish(self) -> None:
        """Wait for what is being written, freed by its end or by `FINISH_TIMEOUT_S`."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=FINISH_TIMEOUT_S)

    async def _write(self) -> None:
        while self._next is not None:
            version, self._next = self._next, None
            context = self._context
            try:
                place = await write_checkpoint(
                    context.store,
                    context.run_id,
                    version,
                    policies=context.config.trained_policies(),
                    folder=self._config.folder / context.run_id,
                    cache_dir=self._cache_dir,
                    rule=self._rule,
                )
            except (DomainError, OSError) as error:
                _log.error("checkpoint_failed", version=version, error=str(error))
            else:
                _log.info("checkpoint_written", version=version, folder=str(place))
