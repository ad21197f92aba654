"""A server whose engine is gone ends with its children, and leaves no shared memory behind."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from flexmarl.rollout.engines.vllm_process import PLUGIN_FOLDER

HOLDER = """
import sys, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
"""
SERVER = f"""
import os, subprocess, sys
sys.path.insert(0, {str(PLUGIN_FOLDER)!r})
import launch
{HOLDER}
child = subprocess.Popen([sys.executable, "-c", {HOLDER + "time.sleep(600)"!r}])
print(child.pid, flush=True)
launch._watch(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("is_cpu", "ranks", "in_one_process"),
    [
        (True, ["1"], True),
        (True, ["1", "2"], False),
        (True, ["2", "1"], True),
        (False, ["1"], False),
    ],
)
def test_one_rank_on_cpus_runs_where_it_is_scheduled(
    monkeypatch: pytest.MonkeyPatch, is_cpu: bool, ranks: list[str], in_one_process: bool
) -> None:
    platform = SimpleNamespace(is_cpu=lambda: is_cpu)
    for name, module in (("vllm", {}), ("vllm.platforms", {"current_platform": platform})):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**module))
    launch = runpy.run_path(str(PLUGIN_FOLDER / "launch.py"))
    arguments = [part for rank in ranks for part in ("--tensor-parallel-size", rank)]
    said = launch["_defaults"](["--model", "m", *arguments])
    assert ("--distributed-executor-backend" in said) == in_one_process


def test_who_loses_its_engine_removes_its_shared_memory(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER + "sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path / "folder/socket")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said = {server.stdout.readline().strip() for _ in range(3)}
        names = {name for name in said if name.startswith("psm_")}
        child = psutil.Process(int((said - names).pop()))
        of_another = Path("/dev/shm", other.stdout.readline().strip())
        files = [Path("/dev/shm", name) for name in names]
        assert len(files) == 2
        assert all(file.exists() for file in files)
        server.stdin.close()  # its engine was killed
        assert server.wait(timeout=30) == 0
        child.wait(timeout=30)
        assert not any(file.exists() for file in files)
        assert of_another.exists()
    finally:
        for process in (server, other):
            process.stdin.close()
            process.wait(timeout=30)
