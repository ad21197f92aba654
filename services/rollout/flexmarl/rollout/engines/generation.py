"""One attempt as the embedded engine holds it: what was asked, what was drawn so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.rollout.v1.engine_pb2 import GenerateRequest, GenerateResult
from flexmarl.rollout.engines.admission import token_limit
from flexmarl.rollout.engines.draw import RowSampling, row_sampling
from flexmarl.rollout.engines.results import version_run


@dataclass(slots=True)
class Generation:
    """A sequence in the making.

    Attributes:
        request: What was asked.
        prompt: Its tokens.
        limit: Most tokens to draw, the context's rest included.
        stop: Tokens that end it; the drawn one is part of the response, with its log-prob (D5).
        sampling: How to draw.
        seed: Of the vertex.
        version: Pinned at the start; a later move of the version does not relabel it (C1).
        started_ns: Unix time.
        tokens: Drawn so far.
        logprobs: One per token.
    """

    request: GenerateRequest
    prompt: list[int]
    limit: int
    stop: frozenset[int]
    sampling: RowSampling
    seed: int
    version: int
    weights_hash: str
    started_ns: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, token: int, logprob: float) -> str | None:
        """Append a drawn token; returns the finish reason once it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    @property
    def counter(self) -> int:
        """Index of the next token in the vertex' response: attempts that moved count, too."""
        return self.request.num_kept + len(self.tokens)

    @property
    def position(self) -> int:
        """Position of the newest drawn token."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def most_columns(self) -> int:
        """Positions that it may come to need in the cache."""
        return len(self.prompt) + self.limit

    def result(
        self,
        *,
        finish_reason: str,
        now_ns: int,
        failure: Failure | None = None,
        infrastructure: bool = False,
    ) -> GenerateResult:
        """The end of the attempt."""
        return GenerateResult(
            attempt_id=self.request.attempt_id,
            instance_id=self.request.instance_id,
            version=self.version,
            weights_hash=self.weights_hash,
            tokens=self.tokens,
            logprobs=self.logprobs,
            finish_reason=finish_reason,
            version_runs=version_run(version=self.version, num_tokens=len(self.tokens)),
            failure=failure,
            infrastructure=infrastructure,
            started_unix_ns=self.started_ns,
            finished_unix_ns=now_ns,
        )


def begin(
    request: GenerateRequest, *, max_context: int, weights_hash: str, now_ns: int
) -> Generation:
    """Make the sequence of a request that was admitted."""
    prompt, sampling = list(request.prompt_tokens), request.sampling
    return Generation(
        request=request,
        prompt=prompt,
        limit=token_limit(request, max_context=max_context),
        stop=frozenset(sampling.stop_token_ids),
        # An unset top_p is 0 on the wire; it cannot mean an empty nucleus.
        sampling=row_sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p or 1.0,
            min_p=sampling.min_p,
        ),
        seed=sampling.seed,
        version=request.version,
        weights_hash=weights_hash,
        started_ns=now_ns,
    )
