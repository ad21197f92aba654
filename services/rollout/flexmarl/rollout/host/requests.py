"""Requests from the dispatcher to engine processes, and their results back.

A request is bounded by the attempt book and fails at once when its instance cannot take it. Every
accepted one ends: by its result, its deadline, or the end of its process (I8).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

from flexmarl.api.rollout.v1.engine_pb2 import GenerateRequest, GenerateResult
from flexmarl.core.errors import ErrorReason
from flexmarl.rollout.engines.results import failed, failure
from flexmarl.rollout.host.attempts import AttemptBook
from flexmarl.rollout.host.engine_process import EngineProcess
from flexmarl.rollout.host.outbox import Outbox
from flexmarl.runtime.logging import get_logger

DEFAULT_TIMEOUT_S: Final = 600.0
"""Longest time of an attempt whose request names none."""

SWEEP_INTERVAL_S: Final = 0.2
"""How often deadlines of attempts are looked at."""

ABORT_PATIENCE_S: Final = 60.0
"""An engine that has not ended an overdue attempt by then hangs, and is killed."""

_log = get_logger(__name__)


class RequestRouter:
    """See the module.

    Args:
        book: Attempts.
        outbox: Where results go.
        find_engine: The running process of an instance.
    """

    def __init__(
        self,
        *,
        book: AttemptBook,
        outbox: Outbox,
        find_engine: Callable[[str], EngineProcess | None],
    ) -> None:
        self._book = book
        self._outbox = outbox
        self._find_engine = find_engine
        self._overdue_on: dict[str, tuple[EngineProcess, float]] = {}
        self._draining = False

    def route(self, requests: Iterable[GenerateRequest]) -> None:
        """Send requests to their engines; refuse what cannot run."""
        now = time.monotonic()
        per_engine: dict[EngineProcess, list[GenerateRequest]] = {}
        refused: list[GenerateResult] = []
        for request in requests:
            if request.attempt_id in self._book:
                continue  # asked again after a reconnect: it runs, or its result goes out again
            if self._book.full:
                # Not kept, unlike all other results, or the bound would be none.
                why = _refusal(request, ErrorReason.QUEUE_FULL, "the host holds too many attempts")
                self._outbox.add_results([why])
                continue
            self._book.accept(
                request, deadline=now + (request.timeout_ms / 1e3 or DEFAULT_TIMEOUT_S)
            )
            engine = self._find_engine(request.instance_id)
            if why_not := self._why_not(request, engine):
                refused.append(_refusal(request, *why_not))
            elif engine is not None:
                per_engine.setdefault(engine, []).append(request)
        for engine, batch in per_engine.items():
            engine.generate(batch)
        self._end(refused)

    def abort(self, attempt_ids: Iterable[str]) -> None:
        """Ask engines to end attempts; each still answers with what it has."""
        per_engine: dict[EngineProcess, list[str]] = {}
        for attempt_id in attempt_ids:
            running = self._book.running(attempt_id)
            engine = running and self._find_engine(running.request.instance_id)
            if engine:
                per_engine.setdefault(engine, []).append(attempt_id)
        for engine, ids in per_engine.items():
            engine.abort(ids)

    def finish(self, results: Iterable[GenerateResult]) -> None:
        """Take what an engine answered."""
        if self._overdue_on:
            for result in results:
                self._overdue_on.pop(result.attempt_id, None)
        self._end(results)

    def fail_all_on(self, instance_id: str, reason: ErrorReason, message: str) -> None:
        """End the attempts of a process that is gone."""
        requests = self._book.running_on(instance_id)
        self._end([_refusal(request, reason, message) for request in requests])

    async def sweep(self) -> None:
        """End attempts whose deadline has passed; runs until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now = time.monotonic()
            for request in self._book.overdue(now):
                self._time_out(request, now)
            hanging = {engine for engine, until in self._overdue_on.values() if until <= now}
            for engine in hanging:
                _log.error("engine_hangs", instance=engine.instance_id, pid=engine.pid)
                engine.kill()
            self._overdue_on = {
                attempt_id: (engine, until)
                for attempt_id, (engine, until) in self._overdue_on.items()
                if engine not in hanging
            }

    def refuse_new(self) -> None:
        """Take no further attempts: the host stops."""
        self._draining = True

    def _why_not(
        self, request: GenerateRequest, engine: EngineProcess | None
    ) -> tuple[ErrorReason, str] | None:
        if self._draining:
            return ErrorReason.DRAINING, "the engine host stops"
        if engine is None or not engine.ready:
            return ErrorReason.NOT_READY, f"{request.instance_id} is not running"
        if request.policy not in engine.policies:
            message = f"{request.instance_id} does not serve policy {request.policy}"
            return ErrorReason.WEIGHTS_MISMATCH, message
        return None

    def _time_out(self, request: GenerateRequest, now: float) -> None:
        engine = self._find_engine(request.instance_id)
        if engine is not None:
            engine.abort([request.attempt_id])
            self._overdue_on[request.attempt_id] = (engine, now + ABORT_PATIENCE_S)
        message = f"{request.attempt_id}: no answer within {request.timeout_ms} ms"
        late = _refusal(request, ErrorReason.DEADLINE_EXCEEDED, message, infrastructure=False)
        self._end([late])

    def _end(self, results: Iterable[GenerateResult]) -> None:
        """End attempts; a result of an attempt that has ended already is dropped."""
        ended = [result for result in results if self._book.end(result)]
        if ended:
            self._outbox.add_results(ended)


def _refusal(
    request: GenerateRequest, reason: ErrorReason, message: str, *, infrastructure: bool = True
) -> GenerateResult:
    return failed(
        request,
        failure(reason, message, {"instance": request.instance_id}),
        infrastructure=infrastructure,
        now_ns=time.time_ns(),
    )
