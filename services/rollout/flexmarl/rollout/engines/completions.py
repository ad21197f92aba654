"""Requests and answers of `/v1/completions`, token-in and token-out."""

from __future__ import annotations

from typing import Any

from flexmarl.api.rollout.v1.engine_pb2 import GenerateRequest, StructuredOutput
from flexmarl.core.seeds import continued_seed
from flexmarl.rollout.engines.http_json import JsonObject
from flexmarl.rollout.engines.remote_engine import Response


def completion_body(request: GenerateRequest, *, max_tokens: int, seeded: bool) -> JsonObject:
    """The request as an OpenAI completion, with what servers of tokens add to it."""
    sampling = request.sampling
    body: JsonObject = {
        "prompt": list(request.prompt_tokens),
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p or 1.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,  # of the sampled tokens alone
        "return_token_ids": True,
    }
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.min_p:
        body["min_p"] = sampling.min_p
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.HasField("structured"):
        body["structured_outputs"] = _structured(sampling.structured)
    if seeded:
        body["seed"] = continued_seed(sampling.seed, num_kept=request.num_kept) % (1 << 63)
    return body


def _structured(form: StructuredOutput) -> JsonObject:
    if form.json_schema:
        return {"json": form.json_schema}
    return {"regex": form.regex} if form.regex else {"choice": list(form.choices)}


def read_completion(answer: JsonObject) -> Response:
    """The only choice of a completion, as tokens.

    Raises:
        LookupError, TypeError: It has no tokens.
    """
    choice: dict[str, Any] = answer["choices"][0]
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    return Response(
        tokens=[int(token) for token in choice["token_ids"]],
        logprobs=[float(logprob) for logprob in logprobs],
        finish_reason=str(choice["finish_reason"]),
    )
