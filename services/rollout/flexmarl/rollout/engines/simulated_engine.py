"""An engine that takes the time of a model without computing one.

A request holds its slot for `tool + prompt / prefill rate + response / decode rate` emulated
seconds, whatever else runs; at most `max_concurrency` hold one, the others wait in order. Taking
over other weights takes the modelled time too, and meanwhile the instance serves nobody. One
emulated second is `time_scale` seconds of wall time.

The model behind it is the uniform distribution over the vocabulary: token t is drawn from the
counter-based generator keyed (seed, t), each with log-probability -ln(vocabulary). So a repeated or
a moved vertex has the same tokens, and a trainer that computes the same distribution sees ratios
of 1. The length of the whole response is the call's own `simulated.output_tokens`, which the
dispatcher does not read.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Final

from flexmarl.api.rollout.v1.engine_pb2 import (
    EngineLoad,
    EngineLoaded,
    EngineReady,
    GenerateRequest,
    GenerateResult,
    SimulatedOptions,
)
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.sampling import uniform
from flexmarl.rollout.engines.admission import WAITING_PER_SLOT, Admission, token_limit
from flexmarl.rollout.engines.base import EngineSettings
from flexmarl.rollout.engines.model_folder import read_shape
from flexmarl.rollout.engines.results import cut_by_load, version_run

_DEFAULT_VOCAB_SIZE: Final = 256
_DEFAULT_CONTEXT: Final = 1 << 20


def build(settings: EngineSettings, _wake: Callable[[], None]) -> SimulatedEngine:
    """Build the engine; of the model folder only config.json is looked at.

    Raises:
        DomainError: INVALID_ARGUMENT, the policy has no latency model.
    """
    options = settings.parsed_options()
    if not options.HasField("simulated"):
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            f"{settings.instance_id}: engine 'simulated' needs a latency model: "
            "set policies.NAME.rollout.simulated",
        )
    shape = read_shape(Path(settings.model_path))
    admission = Admission(
        max_context=shape.context(settings.max_context, default=_DEFAULT_CONTEXT),
        vocab_size=shape.vocab_size or _DEFAULT_VOCAB_SIZE,
        max_waiting=WAITING_PER_SLOT * settings.max_concurrency,
    )
    return SimulatedEngine(
        options.simulated, admission=admission, max_concurrency=settings.max_concurrency
    )


@dataclass(slots=True)
class _Request:
    """A request that holds a slot; times are seconds of the engine's clock.

    Attributes:
        first_at: When the time of the first token begins.
        token_s: Time of one token.
        num_tokens: Tokens of the whole response.
    """

    request: GenerateRequest
    started_ns: int
    first_at: float
    token_s: float
    num_tokens: int

    @property
    def ends_at(self) -> float:
        return self.first_at + self.num_tokens * self.token_s

    def num_made(self, now: float) -> int:
        """Tokens that have been made by now."""
        return min(max(int((now - self.first_at) / self.token_s), 0), self.num_tokens)


class SimulatedEngine:
    """See the module.

    Args:
        options: Latency model.
        admission: Which requests are taken.
        max_concurrency: Slots.
        clock: Seconds.
        sleep: Waits; on the same clock.
    """

    def __init__(
        self,
        options: SimulatedOptions,
        *,
        admission: Admission,
        max_concurrency: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._admission = admission
        self._max_concurrency = max_concurrency
        self._clock = clock
        self._sleep = sleep
        self._logprob = -math.log(admission.vocab_size)
        self._policy = ""
        self._version: int | None = None
        self._weights_hash = ""
        self._waiting: deque[GenerateRequest] = deque()
        self._running: dict[str, _Request] = {}
        self._ends: list[tuple[float, int, _Request]] = []  # a heap; entries of ended ones stay
        self._num_started = 0
        self._ended: list[GenerateResult] = []

    def ready(self) -> EngineReady:
        """Describe the model that is not there."""
        return EngineReady(
            max_context=self._admission.max_context, vocab_size=self._admission.vocab_size
        )

    @property
    def due_in_s(self) -> float | None:
        """Until the first response is complete."""
        if self._ended:
            return 0.0
        first = self._first_to_end()
        return None if first is None else max(first.ends_at - self._clock(), 0.0)

    def submit(self, requests: Iterable[GenerateRequest]) -> None:
        """Accept requests; refusals come out of the next step."""
        now_ns = time.time_ns()
        for request in requests:
            refused = self._admission.refusal(
                request, version=self._version, num_waiting=len(self._waiting), now_ns=now_ns
            )
            if refused is not None:
                self._ended.append(refused)
            else:
                self._waiting.append(request)
                self._admit()

    def abort(self, attempt_ids: Sequence[str]) -> None:
        """End attempts with the tokens that were made by now."""
        now = self._clock()
        for attempt_id in attempt_ids:
            if running := self._running.pop(attempt_id, None):
                self._end(running, running.num_made(now), "abort")
        gone = set(attempt_ids)
        for request in [r for r in self._waiting if r.attempt_id in gone]:
            self._waiting.remove(request)
            self._end(self._start(request), 0, "abort")
        self._admit()

    def load(self, load: EngineLoad) -> EngineLoaded:
        """Take weights over, in the time that the model says; the same content takes none."""
        if load.policy not in self._options.policies:
            answer = EngineLoaded(load_id=load.load_id, version=self._version or 0)
            answer.weights_hash = self._weights_hash
            answer.failure.reason = ErrorReason.WEIGHTS_MISMATCH
            answer.failure.message = f"no latency model of policy {load.policy!r}"
            return answer
        if self._version is None or load.weights_hash != self._weights_hash:
            self._cut_all(load.version)
            times = self._options.policies[load.policy]
            moves = self._policy not in ("", load.policy)
            self._sleep((times.move_s if moves else times.load_s) * self._options.time_scale)
        self._policy, self._version, self._weights_hash = (
            load.policy,
            load.version,
            load.weights_hash,
        )
        return EngineLoaded(
            load_id=load.load_id, version=load.version, weights_hash=load.weights_hash
        )

    def step(self) -> list[GenerateResult]:
        """Hand over what is complete; what waits takes the free slots."""
        now = self._clock()
        while (running := self._first_to_end()) is not None and running.ends_at <= now:
            del self._running[running.request.attempt_id]
            stopped = running.num_tokens < self._limit(running.request)
            self._end(running, running.num_tokens, "stop" if stopped else "length")
        self._admit()
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Nothing: whoever asks was answered by the thread that makes the tokens."""

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_concurrency:
            request = self._waiting.popleft()
            running = self._running[request.attempt_id] = self._start(request)
            self._num_started += 1
            heappush(self._ends, (running.ends_at, self._num_started, running))

    def _first_to_end(self) -> _Request | None:
        """The next request to end; drops what ended otherwise. A look costs O(log n)."""
        while self._ends:
            running = self._ends[0][2]
            if self._running.get(running.request.attempt_id) is running:
                return running
            heappop(self._ends)
        return None

    def _start(self, request: GenerateRequest) -> _Request:
        call, options = request.sampling.simulated, self._options
        prefill_s = len(request.prompt_tokens) / options.prefill_tokens_per_s
        decode_rate = options.policies[self._policy].decode_tokens_per_s
        limit = self._limit(request)
        # An attempt that goes on from kept tokens has its tool behind it, and so much less to draw.
        tool_ms = 0 if request.num_kept else call.tool_ms
        wanted = max(call.output_tokens - request.num_kept, 1) if call.output_tokens else limit
        return _Request(
            request=request,
            started_ns=time.time_ns(),
            first_at=self._clock() + (tool_ms / 1e3 + prefill_s) * options.time_scale,
            token_s=options.time_scale / decode_rate,
            num_tokens=min(wanted, limit),
        )

    def _limit(self, request: GenerateRequest) -> int:
        return token_limit(request, max_context=self._admission.max_context)

    def _cut_all(self, version: int) -> None:
        now_ns = time.time_ns()
        cut = [*(running.request for running in self._running.values()), *self._waiting]
        self._ended += [cut_by_load(request, version=version, now_ns=now_ns) for request in cut]
        self._running.clear()
        self._ends.clear()
        self._waiting.clear()

    def _end(self, running: _Request, num_tokens: int, finish_reason: str) -> None:
        request, vocab_size = running.request, self._admission.vocab_size
        seed, first = request.sampling.seed, request.num_kept
        drawn = range(first, first + num_tokens)
        self._ended.append(
            GenerateResult(
                attempt_id=request.attempt_id,
                instance_id=request.instance_id,
                version=request.version,
                weights_hash=self._weights_hash,
                tokens=[int(uniform(seed, t) * vocab_size) for t in drawn],
                logprobs=[self._logprob] * num_tokens,
                finish_reason=finish_reason,
                version_runs=version_run(version=request.version, num_tokens=num_tokens),
                started_unix_ns=running.started_ns,
                finished_unix_ns=time.time_ns(),
            )
        )
