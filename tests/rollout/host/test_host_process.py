"""An engine host as a process: health means connected, and its engines do not outlive it (I15)."""

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rollout.engines.engine_kit import request
from rollout.host.host_kit import FakeDispatcher, make_load, make_plan, publish_nothing

from flexmarl.api.rollout.v1 import engine_pb2 as pb
from flexmarl.rollout.host.app import HEALTH_NAME


@asynccontextmanager
async def host_process(dispatcher: FakeDispatcher, data_dir):
    address_file = data_dir / "address.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollout.host.host_process"),
        *("--set", "role=engine-host", "--set", f"data_dir={data_dir}"),
        *("--set", f"dispatcher=127.0.0.1:{dispatcher.port}"),
        *("--set", f"server.address_file={address_file}"),
        env={**os.environ, "PYTHONPATH": "tests"},
    )
    try:
        yield process, address_file
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def health(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=HEALTH_NAME), timeout=5)
        return answer.status


async def until_health(address: str, status: int) -> None:
    async with asyncio.timeout(40):
        while await health(address) != status:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def all_gone(pids: list[int]) -> None:
    async with asyncio.timeout(20):
        while any(psutil.pid_exists(pid) for pid in pids):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.05)


@pytest.fixture
async def dispatcher():
    dispatcher = FakeDispatcher()
    await dispatcher.start()
    yield dispatcher
    await dispatcher.stop()


@pytest.fixture
def folders(tmp_path):
    model, store = tmp_path / "model", tmp_path / "store"
    model.mkdir()
    store.mkdir()
    (model / "config.json").write_text("{}")
    return store, model


async def serving(dispatcher, address_file, store, model) -> int:
    """Brings one engine to serve; the host has its address and hears signals then."""
    async with asyncio.timeout(40):
        while not address_file.exists():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    dispatcher.send(plan=make_plan(store, model, "p-0"))
    ref = publish_nothing(store, "v0")
    dispatcher.send(loads=[make_load(ref, "p-0", version=0, weights_hash="h0")])
    status = await dispatcher.until_state("p-0", pb.INSTANCE_STATE_SERVING)
    return status.pid


async def test_health_is_the_connection_and_sigterm_ends_all(dispatcher, folders, tmp_path):
    async with host_process(dispatcher, tmp_path) as (process, address_file):
        engine = await serving(dispatcher, address_file, *folders)
        address = json.loads(address_file.read_text())["address"]
        assert await health(address) == health_pb2.HealthCheckResponse.SERVING
        await dispatcher.stop()
        await until_health(address, health_pb2.HealthCheckResponse.NOT_SERVING)
        await dispatcher.start()
        await until_health(address, health_pb2.HealthCheckResponse.SERVING)
        await dispatcher.until(lambda: len(dispatcher.hellos) == 2)
        # The engine was not touched by the dispatcher's absence.
        assert dispatcher.hellos[-1].instances[0].pid == engine
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert engine in children
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        await all_gone(children)


async def test_sigterm_lets_attempts_in_progress_end(dispatcher, folders, tmp_path):
    async with host_process(dispatcher, tmp_path) as (process, address_file):
        engine = await serving(dispatcher, address_file, *folders)
        os.kill(engine, signal.SIGSTOP)
        asked = request("a0", [1, 2])
        asked.instance_id = "p-0"
        dispatcher.send(requests=[asked])
        late = request("late", [1, 2])
        late.instance_id = "p-9"
        dispatcher.send(requests=[late])
        await dispatcher.until(lambda: "late" in dispatcher.results)  # so a0 has arrived, too
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        os.kill(engine, signal.SIGCONT)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        await dispatcher.until(lambda: "a0" in dispatcher.results)
        assert len(dispatcher.results["a0"].tokens) == 6


async def test_no_engine_outlives_a_killed_host_and_the_next_one_starts_anew(
    dispatcher, folders, tmp_path
):
    async with host_process(dispatcher, tmp_path) as (process, address_file):
        engine = await serving(dispatcher, address_file, *folders)
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert engine in children
        process.kill()
        await process.wait()
        await all_gone(children)
    dispatcher.statuses.clear()
    address_file.unlink()  # a killed process leaves it
    async with host_process(dispatcher, tmp_path):
        await dispatcher.until(lambda: len(dispatcher.hellos) == 2)
        assert dispatcher.hellos[1].incarnation != dispatcher.hellos[0].incarnation
        assert not dispatcher.hellos[1].instances
        assert await serving(dispatcher, address_file, *folders) != engine
