"""One thread of a service waits for its sockets: no pool of gRPC's takes part in a call."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest
from runtime.echo_service import path
from runtime.test_main import read_address, start

__all__ = ["start"]

CALLS = 300
SERVICES = ("meg_store", "rollout", "orchestrator", "trainer")


async def test_no_pool_of_threads_takes_part_in_calls(start, tmp_path):
    """Its own timers wake it now and then, and each call would, at least once."""
    assert await pool_wakes_during_calls(start, tmp_path) < CALLS


async def test_what_the_environment_says_of_grpc_stays(start, tmp_path):
    """And what is told apart above is there: by default the pool takes part in every call."""
    assert await pool_wakes_during_calls(start, tmp_path, GRPC_EXPERIMENTS="") > CALLS


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_grpc_after_it_has_chosen(service):
    """gRPC reads the choice when it is imported."""
    script = f"import sys, flexmarl.{service}.__main__; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


async def pool_wakes_during_calls(start, tmp_path, **environ) -> int:
    """How often threads of gRPC's pool were woken in a service that was called."""
    address_file = tmp_path / "address.json"
    process = start("--set", f"server.address_file={address_file}", **environ)
    described = read_address(address_file)
    async with grpc.aio.insecure_channel(described["address"]) as channel:
        unary = channel.unary_unary(path("Unary"))
        await unary(b"first", timeout=10)
        before = pool_wakes(process.pid)
        for _ in range(CALLS):
            assert await unary(b"next", timeout=10) == b"next"
        after = pool_wakes(process.pid)
    return sum(wakes - before.get(thread, 0) for thread, wakes in after.items())


def pool_wakes(pid: int) -> dict[str, int]:
    """By thread: the pool starts and ends some as it likes, also while one looks."""
    wakes: dict[str, int] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().strip() == "event_engine":
                lines = (task / "status").read_text().splitlines()
                status = dict(line.split(":", 1) for line in lines)
                wakes[task.name] = int(status["voluntary_ctxt_switches"])
    return wakes
