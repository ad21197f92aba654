"""What a policy's section says, at a real vLLM server: shards, dtype, limits, draws."""

from __future__ import annotations

from itertools import pairwise

import psutil
import pytest
from rollout.engines.engine_kit import reference_logprobs, reference_model, request, write_segment
from rollout.host.host_kit import FakeDispatcher, make_load, make_plan, publish, running_host
from rollout.vllm.vllm_kit import PYTHON, make_vllm_folder, needs_vllm
from rollout.worker_harness import run_config

from flexmarl.api.rollout.v1 import engine_pb2 as pb
from flexmarl.rollout.dispatcher.engine_options import engine_options

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), needs_vllm]

MIB = 1 << 20
SECTION = {
    "engine": "vllm",
    "dtype": "bfloat16",
    "max_context": 40,
    "max_concurrency": 4,
    "kv_cache_bytes": 64 * MIB,
    "vllm": {"tensor_parallel_size": 2, "args": ["--max-num-batched-tokens", "512"]},
}
END = 23
GREEDY_FORMS = {"top-k": {"top_k": 1}, "top-p": {"top_p": 1e-6}, "min-p": {"min_p": 0.9999}}


def said(pid: int) -> dict[str, str]:
    """What the server below an engine process was started with."""
    (server,) = psutil.Process(pid).children()
    parts = server.cmdline()
    return {name: value for name, value in pairwise(parts) if name[:2] == "--"}


async def test_a_policys_options_reach_its_server_and_its_draws(tmp_path):
    folder = make_vllm_folder(tmp_path / "model")
    config = run_config(folder, tmp_path, policies={"p": {"rollout": SECTION}})
    rollout = config.policies["p"].rollout
    model = reference_model(folder, seed=11).bfloat16()
    store = tmp_path / "store"
    store.mkdir()
    load = write_segment(tmp_path / "w1", model, version=1)
    ref = publish(store, "v1", load)
    dispatcher = FakeDispatcher()
    await dispatcher.start()

    async def answers(*asked: pb.GenerateRequest) -> list[pb.GenerateResult]:
        for one in asked:
            one.instance_id = "p-0"
        dispatcher.send(requests=asked)
        names = [one.attempt_id for one in asked]
        await dispatcher.until(lambda: set(names) <= dispatcher.results.keys())
        results = [dispatcher.results[name] for name in names]
        assert not any(result.HasField("failure") for result in results), results
        return results

    async with running_host(dispatcher, tmp_path / "host", vllm_python=PYTHON):
        plan = make_plan(
            store, folder, "p-0", engine=rollout.engine, options=engine_options(config, "p")
        )
        plan.instances[0].dtype = rollout.dtype
        plan.instances[0].max_context = rollout.max_context
        plan.instances[0].max_concurrency = rollout.max_concurrency
        dispatcher.send(plan=plan)
        dispatcher.send(loads=[make_load(ref, "p-0", version=1, weights_hash=load.weights_hash)])
        status = await dispatcher.until_state(
            "p-0", pb.INSTANCE_STATE_SERVING, version=1, timeout_s=300
        )
        started_with = said(status.pid)
        expected = {
            "tensor-parallel-size": "2", "dtype": "bfloat16", "max-model-len": "40",
            "max-num-seqs": "4", "kv-cache-memory-bytes": str(64 * MIB),
            "max-num-batched-tokens": "512",
        }  # fmt: skip
        assert {name: started_with[f"--{name}"] for name in expected} == expected

        # Both shards hold their part of the weights: the log-probs are those of the whole model.
        asked = [
            request(f"t{n}", [1 + n, 2], version=1, max_tokens=12, seed=n, temperature=t)
            for n, t in enumerate((0.6, 1.0, 1.4, 1.0))
        ]
        for wanted, result in zip(asked, await answers(*asked), strict=True):
            assert len(result.tokens) == 12
            own = reference_logprobs(
                model, [*wanted.prompt_tokens], [*result.tokens], wanted.sampling.temperature
            )
            assert list(result.logprobs) == pytest.approx(own, abs=0.1)
        assert len({tuple(dispatcher.results[f"t{n}"].tokens) for n in (1, 3)}) == 2

        # Each of these leaves one token to draw, which is the likeliest, and certain then.
        (greedy,) = await answers(request("greedy", [3, 4], version=1, temperature=0.0))
        forms = [
            request(name, [3, 4], version=1, seed=n, **form)
            for n, (name, form) in enumerate(GREEDY_FORMS.items())
        ]
        for result in await answers(*forms):
            assert list(result.tokens) == list(greedy.tokens), result.attempt_id
            assert list(result.logprobs) == pytest.approx([0.0] * 6, abs=1e-6)

        # The context ends what max_tokens would not, and a form ends what neither does.
        (long,) = await answers(request("long", [5] * 30, version=1, max_tokens=64))
        assert (len(long.tokens), long.finish_reason) == (10, "length")
        choice = request("choice", [1, 2], version=1, max_tokens=30, stop=(END,))
        choice.sampling.structured.choices.extend(["abba", "acdc"])
        (formed,) = await answers(choice)
        text = "".join(chr(97 + token) for token in formed.tokens if token != END)
        assert text in ("abba", "acdc")
    await dispatcher.stop()
