"""vLLM under the engine host: killed, it is started again with the weights it was told to serve."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from rollout.engines.engine_kit import (
    reference_logprobs,
    reference_model,
    request,
    write_segment,
)
from rollout.host.host_kit import FakeDispatcher, make_load, make_plan, publish, running_host
from rollout.vllm.vllm_kit import PYTHON, make_vllm_folder, needs_vllm

from flexmarl.api.rollout.v1 import engine_pb2 as pb

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), needs_vllm]


def servers_below(pid: int) -> list[psutil.Process]:
    """Processes of vLLM below an engine process, the server first."""
    return psutil.Process(pid).children(recursive=True)


async def test_a_server_that_is_killed_or_hangs_is_back_with_its_weights_and_leaves_nothing(
    tmp_path,
):
    folder = make_vllm_folder(tmp_path / "model")
    model = reference_model(folder)
    store = tmp_path / "store"
    store.mkdir()
    dispatcher = FakeDispatcher()
    await dispatcher.start()
    load = write_segment(tmp_path / "w5", model, version=5)
    ref = publish(store, "v5", load)
    options = pb.EngineOptions(kv_cache_bytes=64 << 20)
    options.vllm.enforce_eager = options.vllm.seeded = True

    def ask(name: str, **more) -> pb.GenerateRequest:
        asked = request(name, [1, 2, 3], version=5, **more)
        asked.instance_id = "p-0"
        return asked

    async def answered(name: str) -> None:
        dispatcher.send(requests=[ask(name)])
        await dispatcher.until(lambda: name in dispatcher.results)
        result = dispatcher.results[name]
        assert (result.version, result.weights_hash) == (5, load.weights_hash)
        expected = reference_logprobs(model, [1, 2, 3], list(result.tokens))
        assert list(result.logprobs) == pytest.approx(expected, abs=2e-5)

    async with running_host(dispatcher, tmp_path / "host", vllm_python=PYTHON, engine_silence_s=10):
        plan = make_plan(store, folder, "p-0", engine="vllm", max_context=64, options=options)
        dispatcher.send(plan=plan)
        dispatcher.send(loads=[make_load(ref, "p-0", version=5, weights_hash=load.weights_hash)])
        status = await dispatcher.until_state(
            "p-0", pb.INSTANCE_STATE_SERVING, version=5, timeout_s=300
        )
        await answered("before")
        family = servers_below(status.pid)
        os.kill(family[0].pid, signal.SIGSTOP)
        dispatcher.send(requests=[ask("during")])
        os.kill(family[0].pid, signal.SIGKILL)
        await dispatcher.until(lambda: "during" in dispatcher.results)
        assert dispatcher.results["during"].infrastructure
        again = await dispatcher.until_state(
            "p-0", pb.INSTANCE_STATE_SERVING, version=5, timeout_s=300
        )
        if again.pid == status.pid:  # it had not been heard that it died
            await dispatcher.until(lambda: dispatcher.statuses["p-0"].pid != status.pid)
            again = await dispatcher.until_state(
                "p-0", pb.INSTANCE_STATE_SERVING, version=5, timeout_s=300
            )
        assert again.num_restarts == 1 and again.weights_hash == load.weights_hash
        await answered("after")
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive

        # The server lives and answers, the engine behind it has stopped: silence finds it.
        family = servers_below(again.pid)
        for process in family[1:]:
            process.suspend()
        dispatcher.send(requests=[ask("silent")])
        await dispatcher.until(lambda: "silent" in dispatcher.results, timeout_s=60)
        assert dispatcher.results["silent"].infrastructure
        await dispatcher.until(lambda: dispatcher.statuses["p-0"].num_restarts == 2)
        third = await dispatcher.until_state(
            "p-0", pb.INSTANCE_STATE_SERVING, version=5, timeout_s=300
        )
        await answered("after silence")
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
        last = servers_below(third.pid)
    _, alive = psutil.wait_procs(last, timeout=10)
    assert not alive, "vLLM outlived its engine host"
    await dispatcher.stop()
