"""The whole path with the embedded engine: stream, host, forked process, model, weights."""

import os
import signal

import pytest
from rollout.engines.engine_kit import (
    make_model_folder,
    reference_logprobs,
    reference_model,
    request,
    write_segment,
)
from rollout.host.host_kit import (
    FakeDispatcher,
    make_load,
    make_plan,
    publish,
    running_host,
)

from flexmarl.api.rollout.v1 import engine_pb2 as pb
from flexmarl.rollout.engines.registry import PRELOAD

NAMES = ("p-0", "p-1")


@pytest.mark.timeout(120)
async def test_a_killed_engine_is_back_with_the_weights_that_it_was_told_to_serve(tmp_path):
    folder = make_model_folder(tmp_path / "model")
    model = reference_model(folder)
    store = tmp_path / "store"
    store.mkdir()
    dispatcher = FakeDispatcher()
    await dispatcher.start()
    load = write_segment(tmp_path / "w5", model, version=5)
    ref = publish(store, "v5", load)

    def ask(name: str, i: int) -> pb.GenerateRequest:
        asked = request(name, [1 + i % 20, 2], version=5, seed=i, max_tokens=40)
        asked.instance_id = NAMES[i % 2]
        return asked

    def check(name: str, i: int) -> None:
        result = dispatcher.results[name]
        assert (len(result.tokens), result.version) == (40, 5)
        assert result.weights_hash == load.weights_hash
        expected = reference_logprobs(model, [1 + i % 20, 2], list(result.tokens))
        assert list(result.logprobs) == pytest.approx(expected, abs=1e-5)

    async with running_host(dispatcher, tmp_path / "host", preload=PRELOAD):
        dispatcher.send(plan=make_plan(store, folder, *NAMES, engine="transformers"))
        dispatcher.send(loads=[make_load(ref, *NAMES, version=5, weights_hash=load.weights_hash)])
        for name in NAMES:
            await dispatcher.until_state(name, pb.INSTANCE_STATE_SERVING, version=5)
        dispatcher.send(requests=[ask(f"a{i}", i) for i in range(40)])
        await dispatcher.until(lambda: len(dispatcher.results) == 40)
        for i in range(40):
            check(f"a{i}", i)

        pid = dispatcher.statuses["p-0"].pid
        dispatcher.send(requests=[ask(f"b{i}", i) for i in range(30)])
        await dispatcher.until(lambda: any(n.startswith("b") for n in dispatcher.results))
        os.kill(pid, signal.SIGSTOP)
        dispatcher.send(requests=[ask(f"c{i}", i) for i in range(4)])
        await dispatcher.until(lambda: {"c1", "c3"} <= dispatcher.results.keys())
        os.kill(pid, signal.SIGKILL)
        await dispatcher.until(lambda: len(dispatcher.results) == 74)
        for name in ("c0", "c2"):
            assert dispatcher.results[name].failure.reason == "CHILD_DIED"
            assert dispatcher.results[name].infrastructure
        await dispatcher.until(lambda: dispatcher.statuses["p-0"].num_restarts == 1)
        status = await dispatcher.until_state("p-0", pb.INSTANCE_STATE_SERVING, version=5)
        assert status.pid != pid and status.num_restarts == 1
        assert status.weights_hash == load.weights_hash
        dispatcher.send(requests=[ask("d0", 0)])
        await dispatcher.until(lambda: "d0" in dispatcher.results)
        check("d0", 0)
        # The same vertex draws the same tokens on the restarted engine.
        assert dispatcher.results["d0"].tokens == dispatcher.results["a0"].tokens
    await dispatcher.stop()
