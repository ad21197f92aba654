"""Which services a local cluster has, and how each is configured."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from flexmarl.cli.cluster.folder import ClusterFolder, read_json
from flexmarl.cli.cluster.toml import dump_toml
from flexmarl.cli.errors import CliError
from flexmarl.cli.preflight.ports import PortClaims, check_port

STORE: Final = "meg_store"
DISPATCHER: Final = "rollout"
ENGINE_HOST: Final = "engine_host"
TRAINER: Final = "trainer"
ORCHESTRATOR: Final = "orchestrator"

SERVICES: Final = (STORE, DISPATCHER, ENGINE_HOST, TRAINER, ORCHESTRATOR)
"""Names of the services of a cluster, in the order of their dependencies."""

_MODULES: Final = {
    STORE: "flexmarl.meg_store",
    DISPATCHER: "flexmarl.rollout",
    ENGINE_HOST: "flexmarl.rollout",
    TRAINER: "flexmarl.trainer",
    ORCHESTRATOR: "flexmarl.orchestrator",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """What a local cluster is started with.

    Attributes:
        durability: Of the store: "process" or "fsync".
        slots: Device slots of the trainer.
        overrides: `SERVICE.key=value` items, the last word over a service's configuration.
    """

    durability: str = "process"
    slots: int = 1
    overrides: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """As kept in the cluster's folder."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ClusterSettings:
        """Inverse of `to_json`."""
        return cls(
            durability=str(data.get("durability", "process")),
            slots=int(data.get("slots", 1)),
            overrides=tuple(data.get("overrides", ())),
        )

    def value(self, service: str, key: str) -> Any:  # noqa: ANN401 - a TOML value
        """Value that an override gives a key of a service; None when none does."""
        found = None
        for item in self.overrides_of(service):
            name, _, text = item.partition("=")
            if name == key:
                found = _parse(text)
        return found

    def overrides_of(self, service: str) -> list[str]:
        """Overrides of one service, without its name.

        Raises:
            CliError: An override names no service.
        """
        mine = []
        for item in self.overrides:
            name, dot, rest = item.partition(".")
            if not dot or "=" not in rest or name not in SERVICES:
                close = get_close_matches(name, SERVICES, n=1)
                hint = f", did you mean {close[0]!r}?" if close else ""
                raise CliError(
                    f"--service-set {item!r}: write it as SERVICE.key=value with SERVICE one of "
                    f"{', '.join(SERVICES)}{hint}"
                )
            if name == service:
                mine.append(rest)
        return mine


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One service to run.

    Attributes:
        name: Name in the cluster.
        module: Python module to run.
        args: Its arguments.
        config: Text of its configuration file, the first of the arguments.
        config_file: Where that is written to.
        address: host:port that it will listen at.
        address_file: File that it writes once it is ready.
        log_file: File for all of its output.
    """

    name: str
    module: str
    args: tuple[str, ...]
    config: str
    config_file: Path
    address: str
    address_file: Path
    log_file: Path


def plan_services(
    folder: ClusterFolder,
    settings: ClusterSettings,
    *,
    claims: PortClaims,
    names: Sequence[str] = SERVICES,
) -> list[ServiceSpec]:
    """Configures services so that they can start at the same time: each address is fixed before.

    Args:
        folder: Where they live.
        settings: What is asked for.
        claims: Takes the ports that are picked, to be held as long as the services shall run.
        names: Services to run; the store alone is enough to look at stored runs.

    Raises:
        CliError: A configured port is in use, or an override names no service.
    """
    addresses = _addresses(settings, read_json(folder.ports_file) or {}, claims)
    return [_spec(folder, settings, name, addresses) for name in SERVICES if name in names]


def check_plan(folder: ClusterFolder, settings: ClusterSettings) -> None:
    """Refuses what cannot be planned, before anything is started.

    Raises:
        CliError: As `plan_services`.
    """
    with PortClaims() as claims:
        plan_services(folder, settings, claims=claims)


def _addresses(
    settings: ClusterSettings, last_ports: Mapping[str, Any], claims: PortClaims
) -> dict[str, str]:
    addresses = {}
    for name in SERVICES:
        host = settings.value(name, "server.host") or "127.0.0.1"
        port = settings.value(name, "server.port") or 0
        if not isinstance(port, int):
            raise CliError(f"{name}.server.port: not a number: {port!r}")
        check_port(f"{name}.server.port", host, port)
        last = last_ports.get(name)
        if not port and isinstance(last, int) and claims.take(host, last):
            port = last
        addresses[name] = f"{host}:{port or claims.pick(host)}"
    return addresses


def _spec(
    folder: ClusterFolder,
    settings: ClusterSettings,
    name: str,
    addresses: Mapping[str, str],
) -> ServiceSpec:
    home = folder.service(name)
    host, _, port = addresses[name].rpartition(":")
    config: dict[str, Any] = {
        **_own_config(settings, name, addresses, home),
        "server": {"host": host, "port": int(port), "address_file": home / "address.json"},
    }
    config_file = home / "config.toml"
    args = ["--config", str(config_file)]
    for item in settings.overrides_of(name):
        if not item.startswith(("server.host=", "server.port=")):
            args += ["--set", item]
    return ServiceSpec(
        name=name,
        module=_MODULES[name],
        args=tuple(args),
        config=dump_toml(config),
        config_file=config_file,
        address=addresses[name],
        address_file=home / "address.json",
        log_file=folder.log(name),
    )


def _own_config(
    settings: ClusterSettings, name: str, addresses: Mapping[str, str], home: Path
) -> dict[str, Any]:
    match name:
        case "meg_store":
            return {"store": {"data_dir": home, "durability": settings.durability}}
        case "rollout":
            return {"role": "dispatcher", "data_dir": home}
        case "engine_host":
            return {
                "role": "engine-host",
                "data_dir": home,
                "dispatcher": addresses[DISPATCHER],
            }
        case "trainer":
            slots = [f"slot{index}" for index in range(settings.slots)]
            return {"data_dir": home, "slots": slots}
        case _:
            return {
                "data_dir": home,
                "rollout": addresses[DISPATCHER],
                "trainers": [addresses[TRAINER]],
            }


def _parse(text: str) -> Any:  # noqa: ANN401 - a TOML value
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
