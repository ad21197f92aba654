"""Probes of this host: libraries, devices, memory, limits, disks."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from flexmarl.core.doctor import (
    Finding,
    judge_disk,
    judge_gpus,
    judge_open_files,
    judge_package,
    judge_python,
    judge_shared_memory,
)

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the tmpfs of every Linux host
DEFAULT_TIER_BYTES: Final = 1 << 30

Versions = Mapping[str, tuple[int, ...]]
"""Least version of each distribution."""

_WANTED: Final[Versions] = {
    "grpcio": (1, 78),
    "protobuf": (6, 33, 6),
    "pydantic": (2, 10),
    "structlog": (25,),
    "uvloop": (0, 21),
}
_MODELS: Final[Versions] = {"torch": (2, 13), "transformers": (5, 20)}
_WANTED_BY: Final[Mapping[str, Versions]] = {
    "meg-store": {"rocksdict": (0, 3, 29)},
    "engine-host": _MODELS,
    "trainer": {**_MODELS, "peft": (0, 17)},
}
"""Beyond these: what the extra of a service brings."""
_NUM_WRITES: Final = 16
_WRITE_BYTES: Final = 4096
_PROBE_TIMEOUT_S: Final = 20.0


def check_versions(services: Collection[str]) -> list[Finding]:
    """The interpreter, and the libraries that every part needs, and these services."""
    wanted = dict(_WANTED)
    for service in services:
        wanted |= _WANTED_BY.get(service, {})
    return [
        judge_python((sys.version_info.major, sys.version_info.minor)),
        *(judge_package(name, found=_version(name), wanted=low) for name, low in wanted.items()),
    ]


def check_gpus(wanted: int) -> Finding:
    """GPUs that the vendor's tool lists."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "no nvidia-smi" if isinstance(error, FileNotFoundError) else str(error)
        return judge_gpus(wanted=wanted, names=[], failure=why)
    if done.returncode:
        why = (done.stdout + done.stderr).strip().partition("\n")[0]
        return judge_gpus(wanted=wanted, names=[], failure=why)
    return judge_gpus(wanted=wanted, names=done.stdout.split("\n")[:-1], failure="")


def check_shared_memory(folder: Path, *, wanted_bytes: int) -> Finding:
    """Room of the file system that a folder lies in, or would lie in."""
    # The store makes its own folder: the one that it would be made in must be there.
    there = folder if folder.exists() else folder.parent
    try:
        stats = os.statvfs(there)
    except OSError:
        return judge_shared_memory(
            str(folder), total_bytes=None, free_bytes=0, is_tmpfs=False, wanted_bytes=wanted_bytes
        )
    return judge_shared_memory(
        str(there),
        total_bytes=stats.f_frsize * stats.f_blocks,
        free_bytes=stats.f_frsize * stats.f_bavail,
        is_tmpfs=_is_tmpfs(there),
        wanted_bytes=wanted_bytes,
    )


def check_open_files() -> Finding:
    """How many files a process of this user may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_open_files(soft=soft, hard=hard)


def nearest_existing(folder: Path) -> Path:
    """The folder, or the one above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_disk(folder: Path) -> Finding:
    """How long a small durable write takes in a folder that is there; nothing is left behind."""
    try:
        times = _time_writes(folder)
        stats = os.statvfs(folder)
    except OSError as error:
        why = error.strerror or str(error)
        return judge_disk(str(folder), fsync_s=0.0, free_bytes=0, failure=why)
    free_bytes = stats.f_frsize * stats.f_bavail
    return judge_disk(
        str(folder), fsync_s=statistics.median(times), free_bytes=free_bytes, failure=""
    )


def _time_writes(folder: Path) -> list[float]:
    times = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(_NUM_WRITES):
            began = time.perf_counter()
            file.write(bytes(_WRITE_BYTES))
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    return times


def _is_tmpfs(folder: Path) -> bool:
    """Whether the mount that a folder lies in keeps its files in memory."""
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, type_, *_ = line.split(" ")
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, type_
    return kind in ("tmpfs", "ramfs")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
