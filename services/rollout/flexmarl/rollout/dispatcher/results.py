"""What a host's result means to the dispatcher core, and responses that several attempts drew."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexmarl.api.common.v1.common_pb2 import VersionRun
from flexmarl.api.rollout.v1.engine_pb2 import GenerateResult
from flexmarl.core.dispatch_events import (
    AttemptAborted,
    AttemptFailed,
    AttemptSucceeded,
)
from flexmarl.core.errors import ErrorReason

ABORTED = "abort"
"""Finish reason of an attempt that was ended before its end."""


@dataclass(slots=True)
class KeptTokens:
    """What moved attempts of a call drew, in order; its next attempt goes on from them.

    Attributes:
        tokens: The tokens.
        logprobs: One per token.
        runs: Which version drew which; every attempt its own run, so that the row keeps where one
            instance ended and the next began.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[VersionRun] = field(default_factory=list)

    def add(self, result: GenerateResult) -> None:
        """Keeps what an aborted attempt drew."""
        self.tokens.extend(result.tokens)
        self.logprobs.extend(result.logprobs)
        self.runs.extend(result.version_runs)

    def completed_by(self, result: GenerateResult) -> GenerateResult:
        """The whole response, whose end `result` is."""
        whole = GenerateResult(tokens=self.tokens, logprobs=self.logprobs, version_runs=self.runs)
        whole.MergeFrom(result)  # repeated fields are appended, all others taken over
        return whole


def event_of(
    result: GenerateResult, *, num_kept: int
) -> AttemptSucceeded | AttemptFailed | AttemptAborted:
    """The event of a result.

    Args:
        result: What the host said.
        num_kept: Tokens that the call's newest attempt went on from.
    """
    attempt_id = result.attempt_id
    if result.HasField("failure"):
        failure = result.failure
        return AttemptFailed(attempt_id, result.infrastructure, failure.reason, failure.message)
    if result.num_kept != num_kept:
        # Of a dispatcher before this one, whose attempts had the same names.
        message = f"attempt {attempt_id} went on from {result.num_kept} tokens, not {num_kept}"
        return AttemptFailed(attempt_id, True, ErrorReason.CANCELLED, message)
    version = result.version
    num_tokens = num_missing = len(result.tokens)
    for run in result.version_runs:
        num_missing -= run.num_tokens
        if run.version != version:
            version = -1
    if num_missing or len(result.logprobs) not in (0, num_tokens):
        message = (
            f"attempt {attempt_id} has {num_tokens} tokens, {len(result.logprobs)} log-probs and "
            f"versions of {num_tokens - num_missing} tokens"
        )
        return AttemptFailed(attempt_id, True, ErrorReason.INTERNAL, message)
    if result.finish_reason == ABORTED:
        return AttemptAborted(
            attempt_id, version, result.weights_hash, num_tokens, result.input_hash
        )
    return AttemptSucceeded(attempt_id, version, result.weights_hash, num_tokens, result.input_hash)
