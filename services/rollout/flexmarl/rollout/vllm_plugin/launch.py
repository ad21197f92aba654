"""First code of a vLLM server: runs in vLLM's own interpreter, and imports nothing of ours.

    python launch.py SOCKET THREADS [arguments of vLLM's OpenAI server]

Whoever starts it holds its standard input open. When that closes, for whatever reason, the server
and its children end: none outlives its engine. That works through `docker run -i`, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

SERVER = "vllm.entrypoints.openai.api_server"
IN_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs the model where it is scheduled. On CPUs vLLM takes a process of its own for it, to bind its
threads, which we do not want bound; each process imports all of vLLM: a third of a start. Under its
short name, `uni`, it would be turned back into two processes."""
_SHARED_MEMORY = re.compile(r"/dev/shm/psm_\w+")  # noqa: S108 - named by Python


def main() -> None:
    """Set the surroundings, then become the server."""
    socket, threads, *arguments = sys.argv[1:]
    threading.Thread(target=_watch, args=(socket,), name="parent-watch", daemon=True).start()
    os.environ.update(
        VLLM_SERVER_DEV_MODE="1",  # the routes that pause, update weights and resume
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # several engines share the cores
        OMP_NUM_THREADS=threads,
        HF_HUB_OFFLINE="1",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    # For the processes that vLLM spawns: they import the transfer engine beside this file.
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        part for part in (folder, os.environ.get("PYTHONPATH")) if part
    )
    sys.argv = [SERVER, *_defaults(arguments), *arguments]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def _defaults(arguments: Sequence[str]) -> list[str]:
    """Arguments that the platform needs; later ones win."""
    from vllm.platforms import current_platform

    common = ["--disable-uvicorn-access-log"]
    if not current_platform.is_cpu():
        return common
    # The cache has its own size: this is what may be claimed beside it.
    common += ["--gpu-memory-utilization", "0.05", "--block-size", "32"]
    if _value(arguments, "--tensor-parallel-size") == "1":
        common += ["--distributed-executor-backend", IN_ONE_PROCESS]
    return common


def _value(arguments: Sequence[str], name: str) -> str:
    """The last value of an option; empty where it is not given."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return next((value for key, value in reversed(list(pairs)) if key == name), "")


def _watch(socket: str) -> None:
    while os.read(0, 4096):
        pass
    shutil.rmtree(Path(socket).parent, ignore_errors=True)
    children = _descendants(os.getpid())
    # Python removes shared memory when its maker ends in order, which none of these will.
    left = {path for pid in (os.getpid(), *children) for path in _shared_memory(pid)}
    for pid in reversed(children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in left:
        path.unlink(missing_ok=True)
    os._exit(0)


def _shared_memory(pid: int) -> list[Path]:
    """Files of `multiprocessing.shared_memory` that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return [Path(path) for path in paths if _SHARED_MEMORY.fullmatch(path)]


def _descendants(pid: int) -> list[int]:
    """Processes below this one, parents before children."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


if __name__ == "__main__":
    main()
