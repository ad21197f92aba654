"""Which requests an engine takes: the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flexmarl.api.rollout.v1.engine_pb2 import GenerateRequest, GenerateResult
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.engines.results import failed, failure, failure_of, refused_version

WAITING_PER_SLOT: Final = 4
"""Requests that may wait, per slot; the dispatcher sends no more than the slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The rules of one engine.

    Attributes:
        max_context: Longest prompt plus response, tokens.
        vocab_size: Tokens are below it.
        max_waiting: Most requests that wait for a slot (I13).
        knows_text: Whether rules about the text of a response can be kept.
    """

    max_context: int
    vocab_size: int
    max_waiting: int
    knows_text: bool = False

    def refusal(
        self, request: GenerateRequest, *, version: int | None, num_waiting: int, now_ns: int
    ) -> GenerateResult | None:
        """The result of a request that is not taken; None when it is.

        Args:
            request: What is asked.
            version: Version that is served; None before the first load (F1).
            num_waiting: Requests that wait already.
            now_ns: Unix time.
        """
        if version is None or request.version != version:
            return refused_version(request, version=version, now_ns=now_ns)
        if num_waiting >= self.max_waiting:
            why = failure(ErrorReason.QUEUE_FULL, f"{request.instance_id}: too many requests")
            return failed(request, why, infrastructure=True, now_ns=now_ns)
        try:
            self._check(request)
        except DomainError as error:
            return failed(request, failure_of(error), infrastructure=False, now_ns=now_ns)
        return None

    def _check(self, request: GenerateRequest) -> None:
        prompt, sampling = request.prompt_tokens, request.sampling
        if len(prompt) >= self.max_context:
            raise DomainError(
                ErrorReason.PROMPT_TOO_LONG,
                f"{request.attempt_id}: prompt of {len(prompt)} tokens leaves no room for a "
                f"response in a context of {self.max_context}",
                {"prompt_tokens": str(len(prompt)), "max_context": str(self.max_context)},
            )
        if not prompt or max(prompt) >= self.vocab_size:
            message = f"prompt must be tokens below {self.vocab_size}, at least one"
            raise _invalid(request, message)
        if sampling.max_tokens < 1:
            raise _invalid(request, "sampling.max_tokens must be at least 1")
        if not sampling.temperature >= 0 or not 0 <= sampling.top_p <= 1:
            raise _invalid(
                request, "sampling.temperature must be >= 0, sampling.top_p within (0, 1]"
            )
        if not 0 <= sampling.min_p < 1:
            raise _invalid(request, "sampling.min_p must be within [0, 1)")
        if not self.knows_text and (sampling.stop or sampling.HasField("structured")):
            raise _invalid(request, "this engine knows tokens only: no stop texts, no forms")


def token_limit(request: GenerateRequest, *, max_context: int) -> int:
    """Most tokens to draw for a request, what is left of the context included."""
    return min(request.sampling.max_tokens, max_context - len(request.prompt_tokens))


def _invalid(request: GenerateRequest, message: str) -> DomainError:
    return DomainError(ErrorReason.INVALID_ARGUMENT, f"{request.attempt_id}: {message}")
