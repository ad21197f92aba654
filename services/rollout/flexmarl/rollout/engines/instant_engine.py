"""An engine without a model: measures everything around engines, and nothing of them.

It answers in the next step with tokens that are a function of the seed. Load checks nothing but
moves the version, so the protocol around it is the real one. Run configurations cannot name it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from flexmarl.api.rollout.v1.engine_pb2 import (
    EngineLoad,
    EngineLoaded,
    EngineReady,
    GenerateRequest,
    GenerateResult,
)
from flexmarl.rollout.engines.admission import WAITING_PER_SLOT, Admission, token_limit
from flexmarl.rollout.engines.base import EngineSettings
from flexmarl.rollout.engines.results import version_run

_VOCAB_SIZE = 256


def build(settings: EngineSettings, _wake: Callable[[], None]) -> InstantEngine:
    """Build the engine."""
    return InstantEngine(
        Admission(
            max_context=settings.max_context or 1 << 20,
            vocab_size=_VOCAB_SIZE,
            max_waiting=WAITING_PER_SLOT * settings.max_concurrency,
        )
    )


class InstantEngine:
    """Answers at once.

    Args:
        admission: Which requests are taken.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._version: int | None = None
        self._weights_hash = ""
        self._ended: list[GenerateResult] = []

    def ready(self) -> EngineReady:
        """Describe the model that is not there."""
        return EngineReady(
            max_context=self._admission.max_context, vocab_size=self._admission.vocab_size
        )

    @property
    def due_in_s(self) -> float | None:
        """Now while there are answers."""
        return 0.0 if self._ended else None

    def submit(self, requests: Iterable[GenerateRequest]) -> None:
        """Answer."""
        now_ns = time.time_ns()
        self._ended += [self._answer(request, now_ns) for request in requests]

    def abort(self, attempt_ids: Sequence[str]) -> None:
        """Nothing: whatever was submitted has its answer."""

    def load(self, load: EngineLoad) -> EngineLoaded:
        """Serve the version."""
        self._version, self._weights_hash = load.version, load.weights_hash
        return EngineLoaded(
            load_id=load.load_id, version=load.version, weights_hash=load.weights_hash
        )

    def step(self) -> list[GenerateResult]:
        """Hand the answers over."""
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Nothing: whoever asks was answered by the thread that makes the tokens."""

    def _answer(self, request: GenerateRequest, now_ns: int) -> GenerateResult:
        refused = self._admission.refusal(
            request, version=self._version, num_waiting=0, now_ns=now_ns
        )
        if refused is not None:
            return refused
        first = request.sampling.seed + request.num_kept
        num_tokens = token_limit(request, max_context=self._admission.max_context)
        return GenerateResult(
            attempt_id=request.attempt_id,
            instance_id=request.instance_id,
            version=request.version,
            weights_hash=self._weights_hash,
            tokens=[(first + index) % _VOCAB_SIZE for index in range(num_tokens)],
            logprobs=[0.0] * num_tokens,
            finish_reason="length",
            version_runs=version_run(version=request.version, num_tokens=num_tokens),
            started_unix_ns=now_ns,
            finished_unix_ns=now_ns,
        )
