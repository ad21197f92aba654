"""The folder of a local cluster: where its services keep data and logs, and who runs it.

.flexmarl/
  lock             held by the process that runs the cluster
  cluster.json     who that is, and the addresses of its services
  settings.json    what the cluster was last started with; `resume` starts it the same way
  children.json    its services, so that the next start can end what a crash left
  services/<name>/ configuration, address and data of each service
  logs/<name>.log  their logs, one JSON object a line
  cache/           folders that the command line unpacked
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from flexmarl.cli.errors import CliError


@dataclass(frozen=True, slots=True)
class ClusterFolder:
    """Paths below the folder of a local cluster."""

    path: Path

    @property
    def cluster_file(self) -> Path:
        """Who runs the cluster, and where its services listen."""
        return self.path / "cluster.json"

    @property
    def settings_file(self) -> Path:
        """What the cluster was last started with."""
        return self.path / "settings.json"

    @property
    def ports_file(self) -> Path:
        """Ports of the last start, taken again where they are free: stored runs name them."""
        return self.path / "ports.json"

    @property
    def children_file(self) -> Path:
        """Record of the services' processes."""
        return self.path / "children.json"

    @property
    def cache(self) -> Path:
        """Unpacked folders."""
        return self.path / "cache"

    @property
    def logs(self) -> Path:
        """Logs of the services."""
        return self.path / "logs"

    def entries(self) -> list[Path]:
        """All that a cluster keeps here; the lock is the last, held until the rest is gone."""
        files = (self.cluster_file, self.settings_file, self.ports_file, self.children_file)
        folders = (self.path / "services", self.logs, self.cache)
        lock = self.path / "lock"
        return [path for path in (*files, *folders, lock) if path.exists()]

    def service(self, name: str) -> Path:
        """Folder of one service."""
        return self.path / "services" / name

    def log(self, name: str) -> Path:
        """Log of one service."""
        return self.logs / f"{name}.log"

    def lock(self) -> IO[str]:
        """Become the one process that runs this cluster, until the file is closed.

        Raises:
            CliError: Another process does.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / "lock").open("a+", encoding="ascii")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise CliError(
                f"{self.path}: in use by process {holder}; wait for it, stop it with "
                f"`flexmarl down`, or choose another folder with --data-dir"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return file


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when there is none (yet)."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def process_start_s(pid: int) -> float | None:
    """Start of a living process, seconds since the epoch; None when it is gone."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
