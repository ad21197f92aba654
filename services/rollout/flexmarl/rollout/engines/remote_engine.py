"""An engine whose tokens are made by a server: requests go out in threads, results come back.

Each attempt has one thread while it is at the server, at most `max_concurrency` of them; the rest
waits in order. Versions and content are pinned at submission (C1): what was sent before other
weights were loaded ends as cut, whatever the server still answers (I4).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.rollout.v1.engine_pb2 import (
    EngineLoad,
    EngineLoaded,
    EngineReady,
    GenerateRequest,
    GenerateResult,
)
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.engines.admission import Admission, token_limit
from flexmarl.rollout.engines.base import EngineBrokenError
from flexmarl.rollout.engines.http_json import HttpStatusError
from flexmarl.rollout.engines.results import (
    cut_by_load,
    failed,
    failure,
    failure_of,
    version_run,
)

_ABORT_AGAIN_S: Final = 0.05
"""An abort may overtake its request on the way to the server: it is repeated until the end."""

_CLIENT_ERRORS: Final = range(400, 500)
_BUSY: Final = frozenset((408, 425, 429))
"""Refusals that are not the request's fault."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a server made of a request."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


class Backend(Protocol):
    """A server that makes tokens. `generate` runs in threads; the rest in the engine's own."""

    def generate(self, request: GenerateRequest, *, max_tokens: int, salt: str) -> Response:
        """Make the response; returns early with finish reason "abort" when it is aborted.

        Args:
            request: What is asked; its limits were checked.
            max_tokens: Most tokens to draw.
            salt: Content hash of the weights: nothing cached under another one may be used.

        Raises:
            HttpStatusError: It refused.
            DomainError: It will not take this request, however often it is asked.
            Exception: It failed, or its answer makes no sense.
        """
        ...

    def abort(self, attempt_ids: Sequence[str]) -> None:
        """End attempts that are at the server; unknown ones are ignored."""
        ...

    def load(self, load: EngineLoad) -> None:
        """Take over other weights; nothing runs meanwhile.

        Raises:
            DomainError: Refused; what was served before is served on.
        """
        ...

    def label(self, load: EngineLoad) -> None:
        """The content that is held is of this version too, from now on."""
        ...

    def check(self) -> None:
        """Return when the server is found able to make tokens.

        Raises:
            HttpStatusError, OSError: It is not.
        """
        ...


@dataclass(slots=True, eq=False)
class _Attempt:
    request: GenerateRequest
    weights_hash: str
    started_ns: int
    aborted: bool = False


class RemoteEngine:
    """See the module.

    Args:
        backend: The server.
        admission: Which requests are taken.
        max_concurrency: Most requests at the server at once.
        wake: Told when there is something to hand over.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        admission: Admission,
        max_concurrency: int,
        wake: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._admission = admission
        self._max_concurrency = max_concurrency
        self._wake = wake
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix="request")
        self._version: int | None = None
        self._weights_hash = ""
        self._live: dict[str, _Attempt] = {}
        self._aborted_at: float | None = None
        self._lock = threading.Lock()
        self._ended: list[tuple[_Attempt | None, GenerateResult]] = []

    def ready(self) -> EngineReady:
        """Describe the model."""
        return EngineReady(
            max_context=self._admission.max_context, vocab_size=self._admission.vocab_size
        )

    @property
    def due_in_s(self) -> float | None:
        """Now while there are results; soon while an abort is not confirmed."""
        with self._lock:
            if self._ended:
                return 0.0
        if self._aborted_at is None:
            return None
        return max(self._aborted_at + _ABORT_AGAIN_S - time.monotonic(), 0.0)

    def submit(self, requests: Iterable[GenerateRequest]) -> None:
        """Accept requests; refusals come out of the next step."""
        now_ns = time.time_ns()
        for request in requests:
            refused = self._admission.refusal(
                request,
                version=self._version,
                num_waiting=len(self._live) - self._max_concurrency,
                now_ns=now_ns,
            )
            if refused is not None:
                self._add(None, refused)
                continue
            attempt = _Attempt(request, self._weights_hash, now_ns)
            self._live[request.attempt_id] = attempt
            self._threads.submit(self._run, attempt)

    def abort(self, attempt_ids: Sequence[str]) -> None:
        """End attempts with what the server has made."""
        for attempt_id in attempt_ids:
            if attempt := self._live.get(attempt_id):
                attempt.aborted = True
        self._abort_at_server()

    def load(self, load: EngineLoad) -> EngineLoaded:
        """Take weights over; content that is held already only moves the version."""
        try:
            if self._version is not None and load.weights_hash == self._weights_hash:
                self._backend.label(load)
            else:
                self._cut_all(load.version)
                self._backend.load(load)
        except DomainError as error:
            return EngineLoaded(
                load_id=load.load_id,
                version=self._version or 0,
                weights_hash=self._weights_hash,
                failure=failure_of(error),
            )
        self._version, self._weights_hash = load.version, load.weights_hash
        return EngineLoaded(
            load_id=load.load_id, version=load.version, weights_hash=load.weights_hash
        )

    def step(self) -> list[GenerateResult]:
        """Hand over what has ended; repeat aborts that were not heard."""
        with self._lock:
            ended, self._ended = self._ended, []
        results: list[GenerateResult] = []
        for attempt, result in ended:
            if attempt is None:
                results.append(result)
            elif self._live.get(result.attempt_id) is attempt:
                del self._live[result.attempt_id]
                results.append(result)
        if self._aborted_at is not None and self.due_in_s == 0.0:
            self._abort_at_server()
        return results

    def check(self) -> None:
        """Ask the server: this process would answer for one that hangs."""
        try:
            self._backend.check()
        except (OSError, HttpStatusError) as error:
            raise EngineBrokenError(f"the server does not answer: {error}") from error

    def _abort_at_server(self) -> None:
        waiting = [name for name, attempt in self._live.items() if attempt.aborted]
        self._aborted_at = time.monotonic() if waiting else None
        if waiting:
            self._backend.abort(waiting)

    def _run(self, attempt: _Attempt) -> None:
        result = self._result(attempt)
        self._add(attempt, result)
        self._wake()

    def _result(self, attempt: _Attempt) -> GenerateResult:
        request = attempt.request
        try:
            if attempt.aborted:
                return _ended(attempt, Response([], [], "abort"))
            limit = token_limit(request, max_context=self._admission.max_context)
            response = self._backend.generate(request, max_tokens=limit, salt=attempt.weights_hash)
            _check(response, vocab_size=self._admission.vocab_size)
            finite = all(math.isfinite(logprob) for logprob in response.logprobs)
        except HttpStatusError as error:
            fault = error.status in _CLIENT_ERRORS and error.status not in _BUSY
            reason = ErrorReason.INVALID_ARGUMENT if fault else ErrorReason.UNAVAILABLE
            return _failed(request, reason, str(error), infrastructure=not fault)
        except DomainError as error:
            return _failed(request, error.reason, error.message, infrastructure=False)
        except Exception as error:  # noqa: BLE001 - what a server says may be anything
            message = f"{type(error).__name__}: {error}"
            return _failed(request, ErrorReason.UNAVAILABLE, message, infrastructure=True)
        if not finite:
            message = f"{request.attempt_id}: log-probs are not finite"
            return _ended(attempt, response, why=failure(ErrorReason.NON_FINITE, message))
        return _ended(attempt, response)

    def _cut_all(self, version: int) -> None:
        now_ns = time.time_ns()
        for attempt in self._live.values():
            attempt.aborted = True
            self._add(None, cut_by_load(attempt.request, version=version, now_ns=now_ns))
        self._live.clear()
        self._aborted_at = None

    def _add(self, attempt: _Attempt | None, result: GenerateResult) -> None:
        with self._lock:
            self._ended.append((attempt, result))


def _check(response: Response, *, vocab_size: int) -> None:
    tokens, logprobs = response.tokens, response.logprobs
    if len(logprobs) not in (0, len(tokens)):
        raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probs")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(f"a token is outside of the vocabulary of {vocab_size}")


def _failed(
    request: GenerateRequest, reason: ErrorReason, message: str, *, infrastructure: bool
) -> GenerateResult:
    why = failure(reason, f"{request.attempt_id}: {message}")
    return failed(request, why, infrastructure=infrastructure, now_ns=time.time_ns())


def _ended(attempt: _Attempt, response: Response, *, why: Failure | None = None) -> GenerateResult:
    request, num_tokens = attempt.request, len(response.tokens)
    return GenerateResult(
        attempt_id=request.attempt_id,
        instance_id=request.instance_id,
        version=request.version,
        weights_hash=attempt.weights_hash,
        tokens=response.tokens,
        logprobs=response.logprobs,
        finish_reason=response.finish_reason,
        version_runs=version_run(version=request.version, num_tokens=num_tokens),
        failure=why,
        started_unix_ns=attempt.started_ns,
        finished_unix_ns=time.time_ns(),
    )
