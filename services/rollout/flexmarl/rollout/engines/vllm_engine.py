"""vLLM behind the engine interface: token-in, token-out, weights by version.

Weights are checked by content before vLLM sees them, then handed over by path in the four phases of
vLLM's weight transfer protocol, with everything at the server aborted and its caches reset. They
are served only when vLLM names the version and a probe prompt shows that they arrived: its
log-probs are those that the trainer computed with them. Where the trainer computed none they must
be finite, and at the first load other ones than those of the random weights that vLLM started with.
A failure after the first byte went over leaves weights of no version: then the process ends, and is
started again with the last order.
"""

from __future__ import annotations

import contextlib
import http
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from flexmarl.api.rollout.v1.engine_pb2 import EngineLoad, GenerateRequest
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.weights_probe import probe_fault, probe_prompt
from flexmarl.rollout.engines.admission import WAITING_PER_SLOT, Admission
from flexmarl.rollout.engines.base import EngineBrokenError, EngineSettings
from flexmarl.rollout.engines.completions import completion_body, read_completion
from flexmarl.rollout.engines.http_json import HttpServer, HttpStatusError, JsonObject
from flexmarl.rollout.engines.model_folder import read_shape
from flexmarl.rollout.engines.remote_engine import RemoteEngine, Response
from flexmarl.rollout.engines.segment import map_checked
from flexmarl.rollout.engines.vllm_process import (
    MODEL_NAME,
    VllmProcess,
    command_line,
    new_socket_path,
)

EXIT_SERVER_ENDED: Final = 4
"""Exit code of an engine whose vLLM ended."""

_ENGINE_DIED: Final = "EngineCore encountered an issue"
"""What vLLM says when all its requests have failed, and not the one alone."""

_CONTROL_TIMEOUT_S: Final = 120.0
_GENERATE_TIMEOUT_S: Final = 3600.0
"""Longest silence of a generation; its own deadline is kept by the host, which aborts it."""


def build(settings: EngineSettings, wake: Callable[[], None]) -> RemoteEngine:
    """Start vLLM on the model's folder, without weights.

    Raises:
        DomainError: MODEL_INVALID, DEADLINE_EXCEEDED.
    """
    shape = read_shape(Path(settings.model_path))
    if shape.vocab_size is None or shape.max_context is None:
        raise DomainError(
            ErrorReason.MODEL_INVALID,
            f"{settings.model_path}: config.json names no vocab_size or max_position_embeddings",
        )
    options = settings.parsed_options().vllm
    socket = new_socket_path()
    process = VllmProcess(
        command_line(settings, options, socket=socket), socket=socket, on_exit=_end_with
    )
    backend = VllmBackend(
        process.server,
        vocab_size=shape.vocab_size,
        dtype=settings.dtype,
        seeded=options.seeded,
    )
    try:
        process.wait_ready()
        backend.prepare()
    except BaseException:
        process.close()
        raise
    return RemoteEngine(
        backend,
        admission=Admission(
            max_context=shape.context(settings.max_context, default=shape.max_context),
            vocab_size=shape.vocab_size,
            max_waiting=WAITING_PER_SLOT * settings.max_concurrency,
            knows_text=True,
        ),
        max_concurrency=settings.max_concurrency,
        wake=wake,
    )


class VllmBackend:
    """A vLLM server in development mode, with the plugin's transfer engine.

    Args:
        server: Where it listens.
        vocab_size: Of the model.
        dtype: Of its weights.
        seeded: Whether requests carry their seed.
    """

    def __init__(self, server: HttpServer, *, vocab_size: int, dtype: str, seeded: bool) -> None:
        self._server = server
        self._dtype = dtype
        self._seeded = seeded
        self._probe_prompt = probe_prompt(vocab_size)
        self._random_probe: list[float] | None = None

    def prepare(self) -> None:
        """Ready the transfer engine; note what the random weights answer to the probe.

        Raises:
            DomainError: MODEL_INVALID, the server cannot do what is needed of it.
        """
        try:
            self._control("/init_weight_transfer_engine", {"init_info": {}})
            self._random_probe = self.probe(salt="start")
        except (OSError, HttpStatusError, LookupError) as error:
            message = f"vLLM started, but cannot be used: {error}"
            raise DomainError(ErrorReason.MODEL_INVALID, message) from error

    def generate(self, request: GenerateRequest, *, max_tokens: int, salt: str) -> Response:
        """See `Backend.generate`."""
        body = completion_body(request, max_tokens=max_tokens, seeded=self._seeded)
        body |= {
            "model": MODEL_NAME,
            "request_id": request.attempt_id,
            "cache_salt": salt,  # C8: nothing cached under other weights can be hit
            # The stop tokens are all named: the model's own end token among them, or not.
            "ignore_eos": True,
        }
        try:
            answer = self._server.call(
                "POST", "/v1/completions", body, timeout_s=_GENERATE_TIMEOUT_S
            )
        except HttpStatusError as error:
            _refuse_form(request, error)
            raise
        response = read_completion(answer)
        if len(response.tokens) > max_tokens:
            raise ValueError(f"{len(response.tokens)} tokens, asked for {max_tokens}")
        if len(response.logprobs) != len(response.tokens):  # else no row of it could be trained on
            num_logprobs = len(response.logprobs)
            raise ValueError(f"{len(response.tokens)} tokens with {num_logprobs} log-probs")
        return response

    def abort(self, attempt_ids: Sequence[str]) -> None:
        """See `Backend.abort`; one that fails is repeated by the caller."""
        body = {"request_ids": [f"cmpl-{attempt_id}-0" for attempt_id in attempt_ids]}
        with contextlib.suppress(OSError, HttpStatusError):
            self._control("/abort_requests", body)

    def label(self, load: EngineLoad) -> None:
        """See `Backend.label`; touches no request (C2)."""
        try:
            self._control("/update_weight_version", {"new_version": _version_text(load)})
        except (OSError, HttpStatusError) as error:
            raise EngineBrokenError(f"labelling version {load.version}: {error}") from error

    def load(self, load: EngineLoad) -> None:
        """See `Backend.load`.

        Raises:
            EngineBrokenError: Weights of no known version are held now.
        """
        map_checked(load)
        try:
            self.pause(mode="abort")
            self._control("/start_weight_update")
            self._control("/update_weights", {"update_info": _update_info(load)})
            self._control("/finish_weight_update", {"weight_version": _version_text(load)})
            self.reset_prefix_cache()
            self.resume()
            self._verify(load)
        except (OSError, HttpStatusError, LookupError, ValueError) as error:
            raise EngineBrokenError(f"loading version {load.version}: {error}") from error

    def check(self) -> None:
        """See `Backend.check`. Its engine answers this between two steps; `/health` it does not."""
        self._server.call("GET", "/is_sleeping", timeout_s=_CONTROL_TIMEOUT_S)

    def pause(self, *, mode: str) -> None:
        """Stop generating: "abort" ends what runs, "keep" freezes it until `resume`."""
        self._control(f"/pause?mode={mode}")

    def resume(self) -> None:
        """Generate again."""
        self._control("/resume")

    def reset_prefix_cache(self) -> None:
        """Forget what was computed under earlier weights."""
        self._control("/reset_prefix_cache")

    def weight_version(self) -> str:
        """What the server says that it serves."""
        answer = self._server.call("GET", "/weight_info", timeout_s=_CONTROL_TIMEOUT_S)
        return str(answer["weight_version"])

    def probe(self, *, salt: str) -> list[float]:
        """Log-probs of a fixed prompt's tokens under the weights that are held now."""
        body = {
            "model": MODEL_NAME,
            "prompt": self._probe_prompt,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "cache_salt": salt,
        }
        answer = self._control("/v1/completions", body)
        entries = answer["choices"][0]["prompt_logprobs"][1:]
        tokens = self._probe_prompt[1:]
        return [
            float(entry[str(token)]["logprob"])
            for entry, token in zip(entries, tokens, strict=True)
        ]

    def _verify(self, load: EngineLoad) -> None:
        served = self.weight_version()
        if served != _version_text(load):
            raise ValueError(f"vLLM says that it serves {served!r}")
        probe = self.probe(salt=load.weights_hash)
        if fault := probe_fault(load.probe_logprobs, probe, dtype=self._dtype):
            raise ValueError(fault)
        if self._random_probe == probe:
            raise ValueError("vLLM computes as with the random weights that it started with")
        self._random_probe = None

    def _control(self, path: str, body: JsonObject | None = None) -> JsonObject:
        return self._server.call("POST", path, body or {}, timeout_s=_CONTROL_TIMEOUT_S)


def _update_info(load: EngineLoad) -> JsonObject:
    return {
        "path": load.path,
        "names": [buffer.name for buffer in load.buffers],
        "dtypes": [buffer.dtype for buffer in load.buffers],
        "shapes": [list(buffer.shape) for buffer in load.buffers],
        "offsets": [buffer.offset for buffer in load.buffers],
    }


def _refuse_form(request: GenerateRequest, error: HttpStatusError) -> None:
    """Tells a form that vLLM cannot compile from trouble of its own: both are a bare 500.

    It checks a form's grammar before, but not against the tokenizer: with a character that no token
    can write, it ends that one request so, and every other instance would, too. Where its engine
    has died it says that, and the form has nothing to do with it.

    Raises:
        DomainError: INVALID_ARGUMENT.
    """
    sampling = request.sampling
    if error.status != http.HTTPStatus.INTERNAL_SERVER_ERROR or _ENGINE_DIED in str(error):
        return
    if sampling.HasField("structured"):
        (field, _), *_ = sampling.structured.ListFields()
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            f"vLLM fails on the form of the response, structured.{field.name}: look for characters "
            f"that the model's tokenizer has no tokens for; vLLM's log says more ({error})",
        ) from error


def _version_text(load: EngineLoad) -> str:
    return f"{load.version}/{load.weights_hash}"


def _end_with(code: int) -> None:
    """An engine without its server is none: the host sees this process end, and restarts it."""
    sys.stderr.write(f"vLLM ended with code {code}\n")
    sys.stderr.flush()
    os._exit(EXIT_SERVER_ENDED)
