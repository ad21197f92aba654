"""A store process of a benchmark: started, killed, started again on the same data."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.shared_memory import shared_folder


class StoreProcess:
    """One store; durable (`fsync`) unless settings say otherwise.

    Args:
        folder: For its data and its address.
        shm: Folder of its memory tier.
    """

    def __init__(self, folder: Path, shm: Path) -> None:
        self._address_file = folder / "address.json"
        self._settings = (
            f"store.data_dir={folder / 'data'}",
            f"store.shm_dir={shm}",
            f"server.address_file={self._address_file}",
            "log.level=warning",
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start and wait until it serves."""
        self._address_file.unlink(missing_ok=True)
        arguments = [item for value in self._settings for item in ("--set", value)]
        self._process = start_module("flexmarl.meg_store", *arguments)
        self.address = described(self._process, self._address_file)["address"]

    def kill(self) -> None:
        """`kill -9`."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Let it end by itself."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=60)


@contextmanager
def scratch() -> Iterator[tuple[Path, Path]]:
    """Folders for a store's data and its memory tier."""
    folder = Path(tempfile.mkdtemp(prefix="flexmarl-bench-", dir="/var/tmp"))
    try:
        with shared_folder() as shm:
            yield folder, shm
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def serving(folder: Path, shm: Path) -> Iterator[StoreProcess]:
    """A store that serves."""
    process = StoreProcess(folder, shm)
    process.start()
    try:
        yield process
    finally:
        process.stop()


def start_module(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a Python module."""
    return subprocess.Popen([sys.executable, "-m", module, *arguments])


def described(process: subprocess.Popen[bytes], path: Path) -> dict[str, str]:
    """What a process writes into its address file once it serves."""
    end = time.monotonic() + 60
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"process {process.args!r} did not start")
        time.sleep(0.01)
    found: dict[str, str] = json.loads(path.read_text())
    return found
