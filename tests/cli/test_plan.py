"""Configurations of services, and when a dead one is started again."""

from __future__ import annotations

import socket
import tomllib
from pathlib import Path

from ports import own_port

from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.cluster.plan import SERVICES, ClusterSettings, ServiceSpec, plan_services
from flexmarl.cli.cluster.restarts import MAX_RESTARTS, WINDOW_S, GiveUp, Restart, RestartPolicy
from flexmarl.cli.cluster.toml import dump_toml
from flexmarl.cli.preflight.ports import PortClaims, is_free


def plan(folder: Path, settings: ClusterSettings) -> list[ServiceSpec]:
    with PortClaims() as claims:
        return plan_services(ClusterFolder(folder), settings, claims=claims)


def test_every_service_accepts_its_configuration(tmp_path):
    from flexmarl.meg_store.config import MegStoreConfig
    from flexmarl.orchestrator.config import OrchestratorConfig
    from flexmarl.rollout.config import RolloutConfig
    from flexmarl.trainer.config import TrainerConfig

    specs = plan(tmp_path, ClusterSettings(slots=2, durability="fsync"))
    configs = {spec.name: tomllib.loads(spec.config) for spec in specs}
    assert tuple(configs) == SERVICES
    store = MegStoreConfig.model_validate(configs["meg_store"])
    assert store.store.durability == "fsync"
    assert RolloutConfig.model_validate(configs["rollout"]).role == "dispatcher"
    host = RolloutConfig.model_validate(configs["engine_host"])
    addresses = {spec.name: spec.address for spec in specs}
    assert (host.role, host.dispatcher) == ("engine-host", addresses["rollout"])
    trainer = TrainerConfig.model_validate(configs["trainer"])
    assert trainer.slots == ("slot0", "slot1")
    orchestrator = OrchestratorConfig.model_validate(configs["orchestrator"])
    assert orchestrator.trainers == (addresses["trainer"],)
    assert orchestrator.rollout == addresses["rollout"]


def test_an_override_reaches_its_service_alone(tmp_path):
    port = own_port()
    settings = ClusterSettings(
        overrides=(f"trainer.server.port={port}", "meg_store.store.shard=s1")
    )
    specs = {spec.name: spec for spec in plan(tmp_path, settings)}
    assert specs["trainer"].address == f"127.0.0.1:{port}"
    assert specs["meg_store"].args[-2:] == ("--set", "store.shard=s1")
    assert "--set" not in specs["orchestrator"].args


def test_settings_survive_their_file():
    settings = ClusterSettings(durability="fsync", slots=3, overrides=("trainer.x=1",))
    assert ClusterSettings.from_json(settings.to_json()) == settings


def test_toml_reads_back(tmp_path):
    values = {
        "text": 'a "b" \\ ü\n',
        "path": tmp_path,
        "number": 3,
        "share": 0.5,
        "yes": True,
        "names": ["a", "b"],
        "server": {"port": 1, "tls": {"on": False}},
        "only": {"inner": {"x": 1}},
    }
    assert tomllib.loads(dump_toml(values)) == {**values, "path": str(tmp_path)}


def test_ports_are_free_and_outside_of_the_range_of_outgoing_connections():
    with PortClaims() as claims:
        ports = [claims.pick("127.0.0.1") for _ in range(5)]
        assert len(set(ports)) == 5
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low = int(file.read().split()[0])
        assert all(is_free("127.0.0.1", port) and port < low for port in ports)


def test_a_port_that_was_picked_is_picked_by_nobody_else_until_it_is_given_back():
    """Also where nobody listens there yet."""
    with PortClaims() as first, PortClaims() as second:
        port = first.pick("127.0.0.1")
        assert not second.take("127.0.0.1", port)
        first.close()
        assert second.take("127.0.0.1", port)
        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", 0))
            assert not first.take("127.0.0.1", stranger.getsockname()[1])


def test_the_first_death_is_an_accident():
    assert RestartPolicy().died(now=0.0) == Restart(delay_s=0.0, count=1)


def test_delays_grow_and_end():
    policy = RestartPolicy()
    decisions = [policy.died(now=float(number)) for number in range(MAX_RESTARTS + 1)]
    delays = [decision.delay_s for decision in decisions[:-1]]
    assert delays == sorted(delays)
    assert len(set(delays)) == MAX_RESTARTS
    assert decisions[-1] == GiveUp(f"it ended {MAX_RESTARTS + 1} times within {WINDOW_S:g} s")


def test_old_deaths_are_forgotten():
    policy = RestartPolicy()
    for number in range(MAX_RESTARTS):
        policy.died(now=float(number))
    assert policy.died(now=WINDOW_S + MAX_RESTARTS) == Restart(delay_s=0.0, count=1)
