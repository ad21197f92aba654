"""The vLLM engine under a host, with a server that computes nothing in vLLM's place."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from rollout.engines.engine_kit import (
    make_model_folder,
    reference_model,
    request,
    write_segment,
)
from rollout.host.host_kit import FakeDispatcher, make_load, make_plan, publish, running_host

from flexmarl.api.rollout.v1 import engine_pb2 as pb

STAND_IN = f"{sys.executable} {Path(__file__).with_name('stand_in_vllm.py')}"


@pytest.fixture
async def dispatcher():
    dispatcher = FakeDispatcher()
    await dispatcher.start()
    yield dispatcher
    await dispatcher.stop()


@pytest.fixture
def folder(tmp_path):
    return make_model_folder(tmp_path / "model")


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


def options(*args: str) -> pb.EngineOptions:
    found = pb.EngineOptions(kv_cache_bytes=1 << 26)
    found.vllm.seeded = True
    found.vllm.args.extend(args)
    return found


def order(store: Path, folder: Path, scratch: Path, version: int, *names: str) -> pb.LoadWeights:
    load = write_segment(scratch / f"w{version}", reference_model(folder, seed=version), version=0)
    ref = publish(store, f"v{version}", load)
    return make_load(ref, *names, version=version, weights_hash=load.weights_hash)


def ask(name: str, **more) -> pb.GenerateRequest:
    asked = request(name, [1, 2], **more)
    asked.instance_id = "p-0"
    return asked


def server_below(pid: int) -> psutil.Process:
    (server,) = psutil.Process(pid).children()
    return server


async def gone(process: psutil.Process) -> None:
    async with asyncio.timeout(20):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_whichever_of_engine_and_server_is_killed_both_end_and_come_back(
    dispatcher, store, folder, tmp_path
):
    async with running_host(dispatcher, tmp_path / "host", vllm_python=STAND_IN):
        plan = make_plan(store, folder, "p-0", engine="vllm", options=options(), max_context=64)
        dispatcher.send(plan=plan)
        load = order(store, folder, tmp_path, 5, "p-0")
        dispatcher.send(loads=[load])
        status = await dispatcher.until_state("p-0", pb.INSTANCE_STATE_SERVING, version=5)
        for restarts, kill_server in enumerate((True, False), start=1):
            server = server_below(status.pid)
            os.kill(server.pid, signal.SIGSTOP)  # so that the attempt is surely in progress
            name = f"a{restarts}"
            later = ask(f"later{restarts}")
            later.instance_id = "p-9"
            dispatcher.send(requests=[ask(name, version=5, max_tokens=40), later])
            # The host refuses this one after it has taken the other.
            await dispatcher.until(lambda: later.attempt_id in dispatcher.results)  # noqa: B023
            os.kill(server.pid if kill_server else status.pid, signal.SIGKILL)
            if not kill_server:
                os.kill(server.pid, signal.SIGCONT)  # it is to see that its engine is gone
            await dispatcher.until(lambda: name in dispatcher.results)  # noqa: B023
            # The engine may tell of the lost connection before its own end is seen.
            assert dispatcher.results[name].failure.reason in ("CHILD_DIED", "UNAVAILABLE")
            assert dispatcher.results[name].infrastructure
            await gone(server)
            await dispatcher.until(lambda: dispatcher.statuses["p-0"].num_restarts == restarts)  # noqa: B023
            status = await dispatcher.until_state("p-0", pb.INSTANCE_STATE_SERVING, version=5)
            assert status.weights_hash == load.weights_hash
        dispatcher.send(requests=[ask("last", version=5)])
        await dispatcher.until(lambda: "last" in dispatcher.results)
        assert len(dispatcher.results["last"].tokens) == 6
        server = server_below(status.pid)
    await gone(server)


async def test_a_server_that_hangs_is_found_by_its_silence_and_replaced(
    dispatcher, store, folder, tmp_path
):
    """Its engine process lives and would answer; nobody makes tokens any more."""
    described = folder / "config.json"
    described.write_text(
        json.dumps(json.loads(described.read_text()) | {"max_position_embeddings": 512})
    )
    host = running_host(dispatcher, tmp_path / "host", vllm_python=STAND_IN, engine_silence_s=4.0)
    async with host:
        plan = make_plan(store, folder, "p-0", engine="vllm", options=options(), max_context=512)
        dispatcher.send(plan=plan)
        load = order(store, folder, tmp_path, 5, "p-0")
        dispatcher.send(loads=[load])
        status = await dispatcher.until_state("p-0", pb.INSTANCE_STATE_SERVING, version=5)
        # One that works on is asked and left alone, however long that takes.
        names = [f"long{n}" for n in range(16)]
        dispatcher.send(requests=[ask(name, version=5, max_tokens=500) for name in names])
        await dispatcher.until(lambda: set(names) <= dispatcher.results.keys())
        results = [dispatcher.results[name] for name in names]
        assert [str(result.failure) for result in results if len(result.tokens) != 500] == []
        server = server_below(status.pid)
        os.kill(server.pid, signal.SIGSTOP)
        dispatcher.send(requests=[ask("a", version=5)])  # its own deadline is far away
        await dispatcher.until(lambda: "a" in dispatcher.results)
        assert dispatcher.results["a"].failure.reason == "CHILD_DIED"
        assert dispatcher.results["a"].infrastructure
        await gone(server)
        await dispatcher.until(lambda: dispatcher.statuses["p-0"].num_restarts == 1)
        status = await dispatcher.until_state("p-0", pb.INSTANCE_STATE_SERVING, version=5)
        assert status.weights_hash == load.weights_hash


async def test_weights_that_are_not_what_their_hash_says_are_refused_and_told(
    dispatcher, store, folder, tmp_path
):
    async with running_host(dispatcher, tmp_path / "host", vllm_python=STAND_IN):
        plan = make_plan(store, folder, "p-0", engine="vllm", options=options(), max_context=64)
        dispatcher.send(plan=plan)
        good = order(store, folder, tmp_path, 1, "p-0")
        dispatcher.send(loads=[good])
        await dispatcher.until_state("p-0", pb.INSTANCE_STATE_SERVING, version=1)
        bad = order(store, folder, tmp_path, 2, "p-0")
        bad.weights_hash = good.weights_hash[:-4] + "beef"
        dispatcher.send(loads=[bad])
        await dispatcher.until(lambda: dispatcher.statuses["p-0"].HasField("failure"))
        status = dispatcher.statuses["p-0"]
        assert status.failure.reason == "CHECKSUM_MISMATCH"
        assert (status.state, status.version) == (pb.INSTANCE_STATE_SERVING, 1)
        assert status.weights_hash == good.weights_hash
        dispatcher.send(requests=[ask("a", version=1)])
        await dispatcher.until(lambda: "a" in dispatcher.results)
        assert dispatcher.results["a"].weights_hash == good.weights_hash


async def test_a_server_that_does_not_start_is_told_with_its_last_words(
    dispatcher, store, folder, tmp_path
):
    async with running_host(dispatcher, tmp_path / "host", vllm_python=STAND_IN):
        plan = make_plan(
            store, folder, "p-0", engine="vllm", options=options("--refuse"), max_context=64
        )
        dispatcher.send(plan=plan)
        status = await dispatcher.until_state("p-0", pb.INSTANCE_STATE_DEAD)
        assert status.failure.reason == "MODEL_INVALID"
        assert "told to refuse" in status.failure.message


async def test_a_host_without_vllm_says_what_to_set(dispatcher, store, folder, tmp_path):
    async with running_host(dispatcher, tmp_path / "host"):
        dispatcher.send(plan=make_plan(store, folder, "p-0", engine="vllm", options=options()))
        status = await dispatcher.until_state("p-0", pb.INSTANCE_STATE_DEAD)
        assert "vllm_python" in status.failure.message
