"""Finding a cluster that runs already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flexmarl.cli.cluster.folder import ClusterFolder, process_start_s, read_json
from flexmarl.cli.cluster.plan import ORCHESTRATOR, STORE
from flexmarl.cli.errors import CliError

_START_TOLERANCE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A local cluster that another process runs.

    Attributes:
        pid: That process.
        background: True for `flexmarl up`; a cluster of `flexmarl train` ends with its run.
        services: Address, pid, state, restarts and log of each service, by name.
    """

    pid: int
    background: bool
    services: dict[str, dict[str, Any]]

    @property
    def ready(self) -> bool:
        """Whether all services serve."""
        return all(service["state"] == "ready" for service in self.services.values())


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a cluster is reached.

    Attributes:
        store: MEG Store, the home shard of its runs.
        orchestrator: Orchestrator; empty when only the store runs.
    """

    store: str
    orchestrator: str


def find_running(folder: ClusterFolder) -> RunningCluster | None:
    """The cluster that runs in a folder; None when none does."""
    data = read_json(folder.cluster_file)
    if data is None:
        return None
    started_s = process_start_s(int(data["pid"]))
    # The pid alone proves nothing: it may be another process's by now.
    if started_s is None or abs(started_s - data["started_s"]) > _START_TOLERANCE_S:
        return None
    return RunningCluster(int(data["pid"]), bool(data["background"]), data["services"])


def addresses_of(cluster: RunningCluster) -> Addresses:
    """Addresses of a running local cluster."""
    services = cluster.services
    return Addresses(services[STORE]["address"], services.get(ORCHESTRATOR, {}).get("address", ""))


def parse_cluster(items: list[str]) -> Addresses:
    """Reads `--cluster`: the folder of a local cluster, or `store=` and `orchestrator=` addresses.

    Raises:
        CliError: It is neither.
    """
    if len(items) == 1 and "=" not in items[0]:
        path = Path(items[0])
        folder = ClusterFolder(path.parent if path.is_file() else path)
        running = find_running(folder)
        if running is None:
            raise CliError(f"--cluster {items[0]}: no cluster runs there; start one: flexmarl up")
        return addresses_of(running)
    named: dict[str, str] = {}
    for item in items:
        name, _, address = item.partition("=")
        named[name] = address
    unknown = sorted(set(named) - {"store", "orchestrator"})
    if unknown or not named.get("store"):
        raise CliError(
            "--cluster: give the folder of a local cluster, or "
            "--cluster store=HOST:PORT --cluster orchestrator=HOST:PORT"
        )
    for name, address in named.items():
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdigit()):
            raise CliError(f"--cluster {name}={address}: write the address as HOST:PORT")
    return Addresses(named["store"], named.get("orchestrator", ""))
