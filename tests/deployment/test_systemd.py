"""The units and the example configuration of a host: they parse, and agree with each other."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flexmarl.cli.commands.serve import host_config, service_command
from flexmarl.meg_store.config import MegStoreConfig
from flexmarl.orchestrator.config import OrchestratorConfig
from flexmarl.rollout.config import RolloutConfig
from flexmarl.runtime.config import ServiceConfig, load_config
from flexmarl.trainer.config import TrainerConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
FOLDERS = (DEPLOY / "systemd/etc", DEPLOY / "docker/etc")
MODELS: dict[str, type[ServiceConfig]] = {
    "meg-store": MegStoreConfig,
    "rollout": RolloutConfig,
    "engine-host": RolloutConfig,
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
}


class Unit(configparser.RawConfigParser):
    """A unit file without repeated keys."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def read(unit: Path) -> Unit:
    parser = Unit()
    parser.read(unit)
    return parser


def test_each_service_has_a_unit_and_a_file():
    assert {unit.stem.removeprefix("flexmarl-") for unit in UNITS} == set(MODELS)
    for folder in FOLDERS:
        assert {file.stem for file in folder.glob("*.toml")} == set(MODELS)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_that_exists_with_its_file(unit):
    program, serve, service, *options = shlex.split(read(unit)["Service"]["ExecStart"])
    assert (Path(program).name, serve) == ("flexmarl", "serve")
    role = options[1] if options else ""
    assert options == (["--role", role] if role else [])
    command = service_command(service, role=role, config=None, sets=())
    assert command[1] == "-m"
    config = host_config(FOLDERS[0], service, role)
    assert config == FOLDERS[0] / f"{unit.stem.removeprefix('flexmarl-')}.toml"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_waits_for_the_drain_and_starts_again_after_all_but_a_refusal(unit):
    service = read(unit)["Service"]
    defaults = ServiceConfig().server
    assert int(service["TimeoutStopSec"]) > defaults.drain_s + defaults.grace_s
    assert service["Restart"] == "always"
    assert service["RestartPreventExitStatus"] == "2"
    assert int(service["LimitNOFILE"]) >= 65536
    assert service["User"] == "flexmarl"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_shipped_configurations_parse_and_meet(folder):
    configs = {name: load_config(m, path=folder / f"{name}.toml") for name, m in MODELS.items()}
    ports = [config.server.port for config in configs.values()]
    assert len({*ports, *(c.server.metrics_port for c in configs.values())}) == 2 * len(MODELS)
    orchestrator, host = configs["orchestrator"], configs["engine-host"]
    assert isinstance(orchestrator, OrchestratorConfig)
    assert isinstance(host, RolloutConfig)
    dispatcher_port = configs["rollout"].server.port
    assert orchestrator.rollout.endswith(f":{dispatcher_port}")
    assert host.dispatcher.endswith(f":{dispatcher_port}")
    assert host.role == "engine-host"
    assert [t.rpartition(":")[2] for t in orchestrator.trainers] == [
        str(configs["trainer"].server.port)
    ]
    data = tomllib.loads((folder / "meg-store.toml").read_text())["store"]
    assert data["reuse_pool_bytes"] <= data["memory_tier_bytes"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_units(tmp_path):
    # Verified with a program that is there: a host's is in /opt.
    program = Path(sys.executable)
    copies = []
    for unit in UNITS:
        copy = tmp_path / unit.name
        copy.write_text(unit.read_text().replace("/opt/flexmarl/bin/flexmarl", str(program)))
        copies.append(str(copy))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *copies],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "flexmarl" in line]
    assert ours == []
    assert done.returncode == 0, done.stderr
