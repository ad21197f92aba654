"""A server that runs already, behind the engine interface: for policies that are not trained.

It serves whatever it serves: loading weights only moves the version that its answers are filed
under. It must take prompts as token ids on `/v1/completions`. Where it returns no token ids, its
text is encoded with the model folder's tokenizer; log-probs are left out where it has none.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from flexmarl.api.rollout.v1.engine_pb2 import (
    EngineLoad,
    ExternalOptions,
    GenerateRequest,
)
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.engines.admission import WAITING_PER_SLOT, Admission
from flexmarl.rollout.engines.base import EngineSettings
from flexmarl.rollout.engines.completions import completion_body
from flexmarl.rollout.engines.http_json import HttpServer, JsonObject
from flexmarl.rollout.engines.model_folder import read_shape
from flexmarl.rollout.engines.remote_engine import RemoteEngine, Response
from flexmarl.rollout.tokenizer_file import read_tokenizer

_SILENCE_S: Final = 3600.0
"""Longest silence of a generation; its own deadline is kept by the host, which aborts it."""

_DEFAULT_CONTEXT: Final = 1 << 17


def build(settings: EngineSettings, wake: Callable[[], None]) -> RemoteEngine:
    """Build the engine; the server is first asked by the first request.

    Raises:
        DomainError: MODEL_INVALID, INVALID_ARGUMENT.
    """
    folder, options = Path(settings.model_path), settings.parsed_options().external
    backend = ExternalBackend(_server(options), options.model, _tokenizer(folder))
    shape = read_shape(folder)
    return RemoteEngine(
        backend,
        admission=Admission(
            max_context=shape.context(settings.max_context, default=_DEFAULT_CONTEXT),
            vocab_size=shape.vocab_size or 1 << 31,
            max_waiting=WAITING_PER_SLOT * settings.max_concurrency,
            knows_text=True,
        ),
        max_concurrency=settings.max_concurrency,
        wake=wake,
    )


class ExternalBackend:
    """An OpenAI-compatible server by URL.

    Args:
        server: Where it is.
        model: To ask it for.
        tokenizer: Encodes text that comes without tokens.
    """

    def __init__(self, server: HttpServer, model: str, tokenizer: Tokenizer) -> None:
        self._server = server
        self._model = model
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._connections: dict[str, http.client.HTTPConnection] = {}
        self._cut: set[str] = set()

    def generate(self, request: GenerateRequest, *, max_tokens: int, salt: str) -> Response:
        """See `Backend.generate`; what an aborted request has made is not known here."""
        del salt  # its weights are its own
        body = completion_body(request, max_tokens=max_tokens, seeded=True)
        body["model"] = self._model
        connection = self._server.connect(timeout_s=_SILENCE_S)
        name = request.attempt_id
        with self._lock:
            self._connections[name] = connection
        try:
            answer = self._server.call_on(connection, "POST", "/v1/completions", body)
        except OSError:
            with self._lock:
                if name in self._cut:
                    return Response([], [], "abort")
            raise
        finally:
            with self._lock:
                self._connections.pop(name, None)
                self._cut.discard(name)
            connection.close()
        return self._read(answer)

    def abort(self, attempt_ids: Sequence[str]) -> None:
        """Hang up: that is how such a server is told."""
        with self._lock:
            names = self._connections.keys() & set(attempt_ids)
            self._cut |= names
            found = [self._connections[name].sock for name in names]
        for sock in found:
            if sock is not None:  # one that is not open yet is cut by the next call
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def load(self, load: EngineLoad) -> None:
        """Nothing: it has its weights."""

    def label(self, load: EngineLoad) -> None:
        """Nothing: versions are counted here."""

    def check(self) -> None:
        """Nothing: it is not ours to start again."""

    def _read(self, answer: JsonObject) -> Response:
        choice: dict[str, Any] = answer["choices"][0]
        tokens = choice.get("token_ids")
        if tokens is None:
            tokens = self._tokenizer.encode(choice["text"], add_special_tokens=False).ids
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if len(logprobs) != len(tokens):
            logprobs = []
        return Response(
            tokens=[int(token) for token in tokens],
            logprobs=[float(logprob) for logprob in logprobs],
            finish_reason=str(choice.get("finish_reason") or "stop"),
        )


def _server(options: ExternalOptions) -> HttpServer:
    key = ""
    if options.api_key_variable:
        key = os.environ.get(options.api_key_variable, "")
        if not key:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                "rollout.external.api_key_variable: the engine host's environment has no "
                f"{options.api_key_variable}",
            )
    return HttpServer(options.url, {"Authorization": f"Bearer {key}"} if key else {})


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        return read_tokenizer(path)
    except Exception as error:  # noqa: BLE001 - the library raises nothing more special
        raise DomainError(ErrorReason.MODEL_INVALID, f"{path}: {error}") from None
