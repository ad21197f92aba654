"""Which service runs on which of three hosts, and how each is configured.

    a   store s0 (home of runs), dispatcher, orchestrator
    b   store s1, engine host, trainer
    c   store s2, engine host, trainer

Every host has a store: engines and trainers map state from the memory tier of their own host's,
which fetches what another one has. Each trainer has one slot: a policy of two ranks lies on both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from deploy.three_hosts.network import Host, Network

STORE, DISPATCHER, ORCHESTRATOR, TRAINER, ENGINES = 7001, 7002, 7003, 7004, 7005
PLACES: Final = {
    "a": ("meg-store", "rollout", "orchestrator"),
    "b": ("meg-store", "engine-host", "trainer"),
    "c": ("meg-store", "engine-host", "trainer"),
}
PORTS: Final = {
    "meg-store": STORE,
    "rollout": DISPATCHER,
    "orchestrator": ORCHESTRATOR,
    "trainer": TRAINER,
    "engine-host": ENGINES,
}
READY_S = 180.0

_FLEXMARL = str(Path(sys.executable).with_name("flexmarl"))


class ThreeHosts:
    """The cluster; `with` starts it and leaves nothing behind but the folder.

    Args:
        folder: What a host has on its disk is in a folder of its name here.
        memory: The same for what it has in memory: a folder in a tmpfs.
    """

    def __init__(self, folder: Path, memory: Path) -> None:
        self.folder = folder
        self._memory = memory
        self._stack = ExitStack()
        self._processes: dict[str, list[subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> ThreeHosts:
        self._network = Network(*PLACES)
        self._stack.callback(self._network.remove)
        self._stack.callback(shutil.rmtree, self._memory, ignore_errors=True)
        self._stack.callback(self._kill_all)
        try:
            for name in PLACES:
                self._start(name)
            self.wait_ready(*PLACES)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def hosts(self) -> dict[str, Host]:
        """The hosts by name."""
        return self._network.hosts

    @property
    def store_shards(self) -> list[str]:
        """The stores beside the home, as a run lists them."""
        return [self.at(name, STORE) for name in PLACES if name != "a"]

    def at(self, name: str, port: int) -> str:
        """Address of a service."""
        return f"{self.hosts[name].address}:{port}"

    def train_command(self, config: Path) -> list[str]:
        """What trains on this cluster; run it on this machine."""
        shards = ",".join(f'"{address}"' for address in self.store_shards)
        return [
            *(_FLEXMARL, "train", str(config)),
            *("--cluster", f"store={self.at('a', STORE)}"),
            *("--cluster", f"orchestrator={self.at('a', ORCHESTRATOR)}"),
            *("--set", f"store_shards=[{shards}]"),
        ]

    def lose(self, name: str) -> None:
        """A power cut: the cable first, then every process, then what was in memory."""
        self.hosts[name].plug(in_=False)
        self._kill(name)
        shutil.rmtree(self._memory / name, ignore_errors=True)

    def bring_back(self, name: str) -> None:
        """The power is on again: the host starts as it did at first, with what its disk has."""
        self.hosts[name].plug(in_=True)
        self._start(name)
        self.wait_ready(name)

    def wait_ready(self, *names: str) -> None:
        """Wait until all services of these hosts are ready.

        Raises:
            TimeoutError: One is not, with its last line.
        """
        addresses = {self.at(n, PORTS[s]): (n, s) for n in names for s in PLACES[n]}
        end = time.monotonic() + READY_S
        while subprocess.run(
            [_FLEXMARL, "health", *addresses], capture_output=True, check=False
        ).returncode:
            if time.monotonic() > end:
                logs = [str(self.folder / n / f"{s}.log") for n, s in addresses.values()]
                raise TimeoutError(f"not ready within {READY_S:g} s; see {', '.join(logs)}")
            time.sleep(0.2)

    def _start(self, name: str) -> None:
        host, home = self.hosts[name], self.folder / name
        (home / "etc").mkdir(parents=True, exist_ok=True)
        (self._memory / name).mkdir(parents=True, exist_ok=True)
        for service in PLACES[name]:
            config = home / "etc" / f"{service}.toml"
            config.write_text(self._config(name, service), encoding="utf-8")
            command = [_FLEXMARL, "serve", service]
            if service == "engine-host":
                command = [_FLEXMARL, "serve", "rollout", "--role", "engine-host"]
            with (home / f"{service}.log").open("ab") as log:
                process = subprocess.Popen(
                    host.enter(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # On a host of its own this is /etc/flexmarl.
                    env={
                        **os.environ,
                        "FLEXMARL_CONFIG_DIR": str(config.parent),
                        "HF_HUB_OFFLINE": "1",
                        "OMP_NUM_THREADS": "1",
                    },
                    start_new_session=True,
                )
            self._processes.setdefault(name, []).append(process)

    def _config(self, name: str, service: str) -> str:
        """The text of /etc/flexmarl/SERVICE.toml."""
        host, disk = self.hosts[name], self.folder / name / "var"
        own = f'data_dir = "{disk / service}"\n'
        match service:
            case "meg-store":
                shard = f"s{list(PLACES).index(name)}"
                own = f'[store]\nshard = "{shard}"\ndata_dir = "{disk / service}"\n'
                own += f'shm_dir = "{self._memory / name}"\ndurability = "process"\n'
            case "engine-host":
                own += f'role = "engine-host"\nhost_id = "{name}"\n'
                own += f'dispatcher = "{self.at("a", DISPATCHER)}"\n'
            case "trainer":
                own += f'slots = ["{name}0"]\n'
                own += f'interface = "{host.device}"\nrendezvous_host = "{host.address}"\n'
            case "orchestrator":
                trainers = ",".join(
                    f'"{self.at(n, TRAINER)}"' for n in PLACES if "trainer" in PLACES[n]
                )
                own += f'rollout = "{self.at("a", DISPATCHER)}"\ntrainers = [{trainers}]\n'
        # Nobody else is in this network; docs/security.md has the locks for any other one.
        server = f'[server]\nhost = "{host.address}"\nport = {PORTS[service]}\ninsecure = true\n'
        return f"{own}\n{server}"

    def _kill_all(self) -> None:
        for name in self.hosts:
            self._kill(name)

    def _kill(self, name: str) -> None:
        self.hosts[name].kill_all()
        for process in self._processes.pop(name, ()):
            process.wait()
