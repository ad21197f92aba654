"""A real vLLM server that runs already, asked by its URL: nothing of ours is in it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ports import own_port
from rollout.engines.contract import collect
from rollout.engines.engine_kit import (
    make_engine,
    reference_logprobs,
    reference_model,
    request,
)
from rollout.vllm.vllm_kit import PYTHON, make_vllm_folder, needs_vllm

from flexmarl.api.rollout.v1.engine_pb2 import EngineLoad, EngineOptions
from flexmarl.rollout.engines.http_json import HttpServer, HttpStatusError

pytestmark = [pytest.mark.real, pytest.mark.timeout(300), needs_vllm]

END = 23


def start_server(folder: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    arguments = {
        "model": folder, "served-model-name": "judge", "host": "127.0.0.1", "port": port,
        "dtype": "float32", "max-model-len": 64, "kv-cache-memory-bytes": 64 << 20,
        "gpu-memory-utilization": 0.05, "block-size": 32,
    }  # fmt: skip
    parts = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    with log.open("wb") as output:
        return subprocess.Popen(
            [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *parts, "--enforce-eager"],
            stdout=output, stderr=output, start_new_session=True,
            env={
                **os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            },
        )  # fmt: skip


def wait_ready(server: HttpServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            server.call("GET", "/health", timeout_s=5)
        except (OSError, HttpStatusError):
            time.sleep(0.2)
        else:
            return


def test_a_server_that_runs_already_answers_with_its_own_weights(tmp_path):
    folder = make_vllm_folder(tmp_path / "model")
    model = reference_model(folder, seed=5)
    model.save_pretrained(folder)
    port = own_port()
    log = tmp_path / "log"
    process = start_server(folder, port, log)
    options = EngineOptions()
    options.external.url, options.external.model = f"http://127.0.0.1:{port}", "judge"
    try:
        wait_ready(HttpServer(options.external.url), process, log)
        engine = make_engine(
            folder, engine="external", max_context=64, max_concurrency=4,
            options=options.SerializeToString().hex(),
        )  # fmt: skip
        # What a run calls its weights is a name alone: nothing is loaded there.
        load = EngineLoad(load_id="l", policy="p", version=3, weights_hash="its own")
        assert not engine.load(load).HasField("failure")
        asked = [
            request(f"a{n}", [1 + n, 2, 3], version=3, max_tokens=20, seed=n, stop=(END,))
            for n in range(8)
        ]
        asked.append(request("long", [4], version=3, max_tokens=63, stop=(END,)))
        engine.submit(asked)
        engine.abort(["long"])
        results = collect(engine, [one.attempt_id for one in asked])
        for wanted in asked[:-1]:
            result = results[wanted.attempt_id]
            assert not result.HasField("failure"), result
            tokens = list(result.tokens)
            expected = reference_logprobs(model, list(wanted.prompt_tokens), tokens)
            assert list(result.logprobs) == pytest.approx(expected, abs=2e-5)
            assert result.finish_reason == ("stop" if tokens[-1] == END else "length")
        assert results["long"].finish_reason == "abort"  # it waited behind the others
        with_text = request("text", [1, 2], version=3, max_tokens=30)
        with_text.sampling.stop.append("b")
        engine.submit([with_text])
        (last,) = collect(engine, ["text"]).values()
        assert not last.HasField("failure"), last
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own
        process.wait()
