"""A server of completions that computes nothing: vLLM's routes, on a Unix socket or a port.

Tokens are a function of the weights that were loaded last, the seed and the position; each takes
2 ms. It keeps what it was told, so that tests can look; with `most_tokens` set no response gets
longer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import socketserver
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

TOKEN_S = 0.002
VOCAB_SIZE = 24


class CompletionServer:
    """See the module.

    Args:
        socket: Path of its Unix socket; None: a port of its own.
        own_weights: Whether it has weights from the start, like a server that nobody updates.
        ids: Whether it returns token ids.
        vocab_size: Tokens are below it.
    """

    def __init__(
        self,
        socket: Path | None = None,
        *,
        own_weights: bool = False,
        ids: bool = True,
        vocab_size: int = VOCAB_SIZE,
    ):
        self.content = "own" if own_weights else "random"
        self.label = ""
        self.ids = ids
        self.vocab_size = vocab_size
        self.calls: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.stuck = False
        self.most_tokens = 1 << 30
        self.fail_with: int | None = None
        self.says: object = None  # instead of a completion
        self.running: dict[str, threading.Event] = {}
        self.drawn: Counter[str] = Counter()
        self.may_run = threading.Event()
        self.may_run.set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._answer(server.get(self.path))

            def do_POST(self):
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"{}")
                with contextlib.suppress(BrokenPipeError):
                    self._answer(server.post(self.path, body))

            def _answer(self, found: object):
                found = (found, {}) if isinstance(found, int) else found
                status, said = found if isinstance(found, tuple) else (200, found)
                data = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

            def address_string(self):
                return "test"

        class OnSocket(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True
            # A full queue refuses whoever dials a socket of the file system; vLLM's holds 2,048.
            request_queue_size = 2048

        if socket is None:
            self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            self.base = f"http://127.0.0.1:{self._http.server_address[1]}"
        else:
            self._http = OnSocket(str(socket), Handler)
            self.base = f"unix:{socket}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def get(self, path: str) -> dict | int:
        self.calls[path] += 1
        answers = {
            "/health": {},
            "/weight_info": {"weight_version": self.label},
            "/is_sleeping": {"is_sleeping": False},
        }
        return answers.get(path, 404)

    def post(self, path: str, body: dict) -> object:
        parts = urlsplit(path)
        self.calls[path] += 1
        if self.fail_with is not None and parts.path == "/update_weights":
            return self.fail_with
        match parts.path:
            case "/v1/completions":
                return self.complete(body)
            case "/abort_requests":
                for name in body["request_ids"]:
                    if (event := self.running.get(name)) is not None:
                        event.set()
            case "/pause":
                self.may_run.clear()
                if "abort" in parts.query:
                    for event in list(self.running.values()):  # others come and end meanwhile
                        event.set()
            case "/resume":
                self.may_run.set()
            case "/update_weights":
                data = Path(body["update_info"]["path"]).read_bytes()
                if not self.stuck:
                    self.content = hashlib.sha256(data).hexdigest()
            case "/finish_weight_update":
                self.label = body["weight_version"]
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/init_weight_transfer_engine" | "/start_weight_update" | "/reset_prefix_cache":
                pass
            case _:
                return 404
        return {"ok": True}

    def complete(self, body: dict) -> object:
        self.bodies.append(body)
        if not body["prompt"] or max(body["prompt"]) >= self.vocab_size:
            return 400
        if "prompt_logprobs" in body:
            rng = random.Random(self.content)
            entries = [{str(t): {"logprob": -rng.random()}} for t in body["prompt"]]
            return {"choices": [{"prompt_logprobs": [None, *entries[1:]], "token_ids": [0]}]}
        if self.says is not None:
            return self.says
        rng = random.Random(f"{self.content}/{body.get('seed')}")
        name = f"cmpl-{body.get('request_id', id(body))}-0"
        aborted = self.running[name] = threading.Event()
        tokens: list[int] = []
        while len(tokens) < body["max_tokens"] and not aborted.is_set():
            self.may_run.wait(0.01)
            held = len(tokens) >= self.most_tokens
            if self.may_run.is_set() and not aborted.wait(TOKEN_S) and not held:
                tokens.append(rng.randrange(self.vocab_size))
                self.drawn[name] = len(tokens)
        del self.running[name]
        choice = {
            "text": "".join(chr(97 + token) for token in tokens),
            "logprobs": {"token_logprobs": [-rng.random() for _ in tokens]},
            "finish_reason": "abort" if aborted.is_set() else "length",
        }
        if self.ids:
            choice["token_ids"] = tokens
        return {"choices": [choice]}
