"""A vLLM server as a child process: its command line, its start, its end.

vLLM runs in an interpreter (or a container) of its own, which has nothing of ours but the two files
of `rollout/vllm_plugin`. Its RL routes are remote code execution, so it listens on a Unix socket
that this process alone knows. It belongs to this process's group, and ends itself when its standard
input closes: no vLLM outlives its engine (I15), whichever of them is killed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket as socket_module
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from flexmarl.api.rollout.v1.engine_pb2 import VllmOptions
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.engines.base import EngineSettings
from flexmarl.rollout.engines.http_json import HttpServer, HttpStatusError

PLUGIN_FOLDER: Final = Path(__file__).parents[1] / "vllm_plugin"
MODEL_NAME: Final = "policy"
"""Name of the model in requests, whatever it is."""

_START_TIMEOUT_S: Final = 580.0
"""Just below the host's patience with a start, so that the server's last words are told."""
_TAIL_LINES: Final = 30
_FOLDER_PREFIX: Final = "flexmarl-vllm-"
_STALE_S: Final = 3600.0
"""A folder that is older, and whose socket nobody serves, is left from a server that was killed."""


def command_line(settings: EngineSettings, options: VllmOptions, *, socket: str) -> list[str]:
    """How the server is started.

    Raises:
        DomainError: MODEL_INVALID, the host has no interpreter with vLLM.
    """
    if not settings.vllm_python:
        raise DomainError(
            ErrorReason.MODEL_INVALID,
            f"{settings.instance_id}: engine 'vllm' needs an interpreter that has vLLM: set "
            "vllm_python of the engine host",
        )
    arguments = {
        "model": settings.model_path,
        "served-model-name": MODEL_NAME,
        "uds": socket,
        # Weights come by version from the store; what lies in the folder is never served.
        "load-format": "dummy",
        "dtype": settings.dtype,
        "max-num-seqs": settings.max_concurrency,
        "tensor-parallel-size": options.tensor_parallel_size or 1,
        "kv-cache-memory-bytes": settings.kv_cache_bytes,
        # Of the distribution that is drawn from: the trainer divides by the temperature too.
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": "flexmarl_segments.WorkerExtension",
        "weight-transfer-config": '{"backend": "flexmarl"}',
    }
    if settings.max_context:
        arguments["max-model-len"] = settings.max_context
    return [
        *shlex.split(settings.vllm_python),
        str(PLUGIN_FOLDER / "launch.py"),
        socket,
        str(settings.threads),
        *(part for name, value in arguments.items() for part in (f"--{name}", str(value))),
        *(["--enforce-eager"] if options.enforce_eager else []),
        *options.args,
    ]


class VllmProcess:
    """See the module.

    Args:
        command: To start it.
        socket: Where it will listen.
        on_exit: Called from a thread with the exit code when it ends after it was ready.
    """

    def __init__(self, command: list[str], *, socket: str, on_exit: Callable[[int], None]) -> None:
        self.server = HttpServer(f"unix:{socket}")
        self._socket = socket
        self._on_exit = on_exit
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # held open: its closing tells the server to end
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(),
            )
        except OSError as error:
            shutil.rmtree(Path(socket).parent, ignore_errors=True)
            message = f"vllm_python: {command[0]}: {error.strerror}"
            raise DomainError(ErrorReason.MODEL_INVALID, message) from error
        assert self._process.stdout is not None
        threading.Thread(
            target=self._forward, args=(self._process.stdout,), name="vllm log", daemon=True
        ).start()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def wait_ready(self, *, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Wait until the server answers; freed by its end, too.

        Raises:
            DomainError: MODEL_INVALID, it ended; DEADLINE_EXCEEDED.
        """
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            if (code := self._process.poll()) is not None:
                raise DomainError(
                    ErrorReason.MODEL_INVALID,
                    f"vLLM ended with code {code} at its start: {self.last_words()}",
                )
            if time.monotonic() > deadline:
                self._process.kill()
                message = f"vLLM was not ready within {timeout_s:.0f} s: {self.last_words()}"
                raise DomainError(ErrorReason.DEADLINE_EXCEEDED, message)
            time.sleep(0.1)
        threading.Thread(target=self._watch, name="vllm exit", daemon=True).start()

    def last_words(self) -> str:
        """The most telling of its last lines."""
        lines = [line for line in self._tail if "Error" in line] or list(self._tail)
        return lines[-1].strip() if lines else "it said nothing"

    def close(self) -> None:
        """End it; waits for that."""
        self._on_exit = _ignore
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        shutil.rmtree(Path(self._socket).parent, ignore_errors=True)

    def _healthy(self) -> bool:
        try:
            self.server.call("GET", "/health", timeout_s=5.0)
        except (OSError, HttpStatusError):
            return False
        return True

    def _watch(self) -> None:
        code = self._process.wait()
        shutil.rmtree(Path(self._socket).parent, ignore_errors=True)
        self._on_exit(code)

    def _forward(self, output: IO[bytes]) -> None:
        for raw in output:
            line = raw.decode(errors="replace").rstrip()
            self._tail.append(line)
            sys.stderr.write(f"vllm: {line}\n")


def new_socket_path() -> str:
    """A path for a socket, short enough for the kernel, in a folder of this user alone.

    Folders that killed servers left behind are removed on the way.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            old = time.time() - folder.stat().st_mtime > _STALE_S
            if old and not _answers(folder / "s"):
                shutil.rmtree(folder)
    return f"{tempfile.mkdtemp(prefix=_FOLDER_PREFIX)}/s"


def _answers(path: Path) -> bool:
    with socket_module.socket(socket_module.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _environment() -> dict[str, str]:
    """Ours, without what would lead another interpreter to our packages."""
    drop = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    return {name: value for name, value in os.environ.items() if name not in drop}


def _ignore(_code: int) -> None:
    """Nobody is told."""
