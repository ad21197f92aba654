"""The embedded engine: a transformers model with continuous batching at token granularity.

A step prefills what waits (together, as far as the bounds allow), then decodes one token of every
running sequence. So a new request joins between two tokens of the others, and a finished one
leaves at once. Row i of the cache belongs to `self._running[i]`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import torch

from flexmarl.api.rollout.v1.engine_pb2 import (
    EngineLoad,
    EngineLoaded,
    EngineReady,
    GenerateRequest,
    GenerateResult,
)
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.sampling import uniform
from flexmarl.rollout.engines.admission import WAITING_PER_SLOT, Admission
from flexmarl.rollout.engines.base import EngineSettings
from flexmarl.rollout.engines.causal_model import CausalModel
from flexmarl.rollout.engines.draw import draw
from flexmarl.rollout.engines.generation import Generation, begin
from flexmarl.rollout.engines.results import cut_by_load, failure, failure_of
from flexmarl.rollout.engines.weights import take_over

_PREFILL_TOKENS: Final = 8192
"""Padded tokens of one prefill pass: bounds its memory, and how long running sequences wait."""


def build(settings: EngineSettings, _wake: Callable[[], None]) -> TransformersEngine:
    """Build the engine, without weights.

    Raises:
        DomainError: MODEL_INVALID.
    """
    torch.set_num_threads(settings.threads)
    model = CausalModel(
        Path(settings.model_path),
        dtype=settings.dtype,
        device=settings.device,
        max_context=settings.max_context,
    )
    return TransformersEngine(model, settings)


class TransformersEngine:
    """See the module; one per process.

    Args:
        model: Without weights.
        settings: As it was started.
    """

    def __init__(self, model: CausalModel, settings: EngineSettings) -> None:
        self._model = model
        self._max_concurrency = settings.max_concurrency
        self._admission = Admission(
            max_context=model.shape.max_context,
            vocab_size=model.shape.vocab_size,
            max_waiting=WAITING_PER_SLOT * settings.max_concurrency,
        )
        self._kv_cache_bytes = settings.kv_cache_bytes
        self._version: int | None = None
        self._weights_hash = ""
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._ended: list[GenerateResult] = []

    def ready(self) -> EngineReady:
        """Describe the model."""
        shape = self._model.shape
        return EngineReady(max_context=shape.max_context, vocab_size=shape.vocab_size)

    @property
    def due_in_s(self) -> float | None:
        """Now while anything runs: the engine computes whenever it can."""
        return 0.0 if self._running or self._waiting or self._ended else None

    def submit(self, requests: Iterable[GenerateRequest]) -> None:
        """Accept requests; refusals come out of the next step."""
        now_ns = time.time_ns()
        for request in requests:
            refused = self._admission.refusal(
                request,
                version=self._version,
                num_waiting=len(self._waiting),
                now_ns=now_ns,
            )
            if refused is not None:
                self._ended.append(refused)
                continue
            self._waiting.append(
                begin(
                    request,
                    max_context=self._admission.max_context,
                    weights_hash=self._weights_hash,
                    now_ns=now_ns,
                )
            )

    def abort(self, attempt_ids: Sequence[str]) -> None:
        """End attempts with the tokens that they have."""
        wanted = set(attempt_ids)
        now_ns = time.time_ns()
        leaving: list[int] = []
        for row, generation in enumerate(self._running):
            if generation.request.attempt_id in wanted:
                self._end(generation, "abort", now_ns)
                leaving.append(row)
        self._remove(leaving)
        kept: deque[Generation] = deque()
        for generation in self._waiting:
            if generation.request.attempt_id in wanted:
                self._end(generation, "abort", now_ns)
            else:
                kept.append(generation)
        self._waiting = kept

    def load(self, load: EngineLoad) -> EngineLoaded:
        """Take weights over; content that is held already only moves the version."""
        answer = EngineLoaded(load_id=load.load_id)
        if self._version is None or load.weights_hash != self._weights_hash:
            try:
                take_over(self._model.model, load)
            except DomainError as error:
                answer.failure.CopyFrom(failure_of(error))
                answer.version = self._version or 0
                answer.weights_hash = self._weights_hash
                return answer
            self._cut_all(load.version)
            self._model.cache.clear()
            self._weights_hash = load.weights_hash
        self._version = load.version
        answer.version = load.version
        answer.weights_hash = self._weights_hash
        return answer

    @torch.inference_mode()
    def step(self) -> list[GenerateResult]:
        """Prefill what waits and fits, then one token for every running sequence."""
        while self._waiting:
            joining = self._joining()
            if not joining:
                break
            self._prefill(joining)
        if self._running:
            self._decode()
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Nothing: whoever asks was answered by the thread that makes the tokens."""

    def _joining(self) -> list[Generation]:
        """The next waiting sequences that fit beside the running ones; one alone always fits."""
        budget_cells = self._kv_cache_bytes // self._model.cache.cell_bytes
        rows = len(self._running)
        columns = max((g.most_columns for g in self._running), default=0)
        width = 0
        joining: list[Generation] = []
        while self._waiting and rows < self._max_concurrency:
            candidate = self._waiting[0]
            columns = max(columns, candidate.most_columns)
            width = max(width, len(candidate.prompt))
            if rows and (rows + 1) * columns > budget_cells:
                break
            if joining and (len(joining) + 1) * width > _PREFILL_TOKENS:
                break
            joining.append(self._waiting.popleft())
            rows += 1
        return joining

    def _prefill(self, joining: list[Generation]) -> None:
        first_row = len(self._running)
        self._running += joining
        columns = max(len(generation.prompt) for generation in joining)
        self._model.cache.ensure(rows=len(self._running), columns=columns)
        logits = self._model.prefill([g.prompt for g in joining], first_row=first_row)
        self._draw(logits, first_row)

    def _decode(self) -> None:
        tokens = [generation.tokens[-1] for generation in self._running]
        positions = [generation.position for generation in self._running]
        self._model.cache.ensure(rows=len(tokens), columns=max(positions) + 1)
        self._draw(self._model.decode(tokens, positions), 0)

    def _draw(self, logits: torch.Tensor, first_row: int) -> None:
        """Draw a token for each row from `first_row` on; let the finished ones go."""
        rows = self._running[first_row:]
        drawn = draw(
            logits,
            [generation.sampling for generation in rows],
            [uniform(generation.seed, generation.counter) for generation in rows],
        )
        now_ns = time.time_ns()
        leaving: list[int] = []
        for row, generation in enumerate(rows, start=first_row):
            token, logprob = drawn.tokens[row - first_row], drawn.logprobs[row - first_row]
            if math.isnan(logprob):
                self._end_non_finite(generation, now_ns)
                self._model.cache.clear_row(row)
            elif (reason := generation.add(token, logprob)) is None:
                continue
            else:
                self._end(generation, reason, now_ns)
            leaving.append(row)
        self._remove(leaving)

    def _end(self, generation: Generation, reason: str, now_ns: int) -> None:
        self._ended.append(generation.result(finish_reason=reason, now_ns=now_ns))

    def _end_non_finite(self, generation: Generation, now_ns: int) -> None:
        message = f"{generation.request.attempt_id}: logits are not finite"
        why = failure(ErrorReason.NON_FINITE, message)
        self._ended.append(generation.result(finish_reason="", now_ns=now_ns, failure=why))

    def _cut_all(self, version: int) -> None:
        now_ns = time.time_ns()
        for generation in (*self._running, *self._waiting):
            self._ended.append(cut_by_load(generation.request, version=version, now_ns=now_ns))
        self._running.clear()
        self._waiting.clear()

    def _remove(self, leaving: list[int]) -> None:
        """Take rows out and fill the holes from the end, so that rows stay without holes."""
        if not leaving:
            return
        running = self._running
        left = len(running) - len(leaving)
        gone = set(leaving)
        targets = [row for row in leaving if row < left]
        sources = [row for row in range(left, len(running)) if row not in gone]
        if targets:
            columns = max(running[row].position for row in sources)
            self._model.cache.compact(sources=sources, targets=targets, num_columns=columns)
            for source, target in zip(sources, targets, strict=True):
                running[target] = running[source]
        del running[left:]
