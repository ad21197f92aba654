"""Every combination of the compose files is one cluster that can be started."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose.compose_kit import compose_command

ROOT = Path(__file__).parents[2]
BASE = ROOT / "docker-compose.yml"
OVERLAYS = sorted((ROOT / "deploy/compose").glob("*.yml"))
SERVICES = {"meg-store", "rollout", "engine-host", "trainer", "orchestrator"}
COMBINATIONS = [
    chosen for n in range(len(OVERLAYS) + 1) for chosen in itertools.combinations(OVERLAYS, n)
]


@functools.cache
def load(file: Path) -> dict[str, Any]:
    found = yaml.safe_load(file.read_text())
    assert isinstance(found, dict)
    return found


def services_of(file: Path) -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = load(file)["services"]
    return services


def test_the_cluster_has_its_services_and_its_pages():
    assert set(services_of(BASE)) == SERVICES | {"client", "prometheus", "grafana"}
    assert {file.stem for file in OVERLAYS} == {
        "engine-hosts",
        "gpu",
        "stores",
        "trainers",
        "vllm-cpu",
    }


@pytest.mark.parametrize("file", [BASE, *OVERLAYS], ids=lambda file: file.stem)
def test_our_services_give_up_what_they_do_not_need_and_come_back(file):
    for name, service in services_of(file).items():
        mine = str(service.get("image", "")).startswith("flexmarl-")
        if not mine or "volumes" not in service:
            continue  # the vendor's, or a change of one that stands in the base
        assert service["init"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        if name != "client":
            assert service["restart"] == "unless-stopped"
            assert service["stop_grace_period"] == "30s"
        assert "ports" not in service
        assert "privileged" not in service


@pytest.mark.parametrize(
    "chosen", COMBINATIONS, ids=lambda chosen: "+".join(f.stem for f in chosen)
)
def test_a_combination_shares_what_a_node_shares_and_nothing_else(chosen):
    files = [load(file) for file in (BASE, *chosen)]
    declared = {name for file in files for name in file.get("volumes") or {}}
    mounts: dict[str, list[tuple[str, str]]] = {}
    for file in files:
        for name, service in file["services"].items():
            for mount in service.get("volumes", ()):
                source, target = mount.rsplit(":ro", 1)[0].rsplit(":", 1)
                mounts.setdefault(target, []).append((name, source))
                if source.startswith("./"):
                    continue
                assert source in declared or source.startswith("${"), f"{name}: {mount}"
    state = dict(mounts["/run/flexmarl"])
    assert {state[name] for name in SERVICES & set(state)} == {"memory"}
    # What a service keeps for itself is its own: two on one folder would end each other.
    for target in ("/var/lib/flexmarl/rollout", "/var/lib/flexmarl/trainer"):
        sources = [source for _, source in mounts[target]]
        assert len(sources) == len(set(sources))
    stores = {n: s for n, s in mounts["/var/lib/flexmarl/meg-store"] if n.startswith("meg-store")}
    assert len(set(stores.values())) == len(stores)


@pytest.mark.parametrize(
    "chosen", COMBINATIONS, ids=lambda chosen: "+".join(f.stem for f in chosen)
)
def test_addresses_name_services_that_are_there(chosen):
    there = {name for file in (BASE, *chosen) for name in services_of(file)}
    environment: dict[str, str] = {}
    for file in (BASE, *chosen):
        for service in services_of(file).values():
            environment |= service.get("environment") or {}
    named = {
        item.partition("=")[2].partition(":")[0] for item in environment["FLEXMARL_CLUSTER"].split()
    }
    trainers = environment.get("FLEXMARL_ORCHESTRATOR__TRAINERS")
    if trainers is not None:
        listed = tomllib.loads(f"trainers = {trainers}")["trainers"]
        assert len(listed) == len({*listed})
        named |= {address.partition(":")[0] for address in listed}
    assert named <= there


def test_prometheus_knows_every_service_of_every_overlay():
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    scraped = {
        (name, found["port"])
        for job in config["scrape_configs"]
        for found in job["dns_sd_configs"]
        for name in found["names"]
    }
    served = {
        (name, metrics_port(kind))
        for file in (BASE, *OVERLAYS)
        for name in services_of(file)
        if (kind := re.sub(r"-\d$", "", name)) in SERVICES
    }
    assert scraped == served


def metrics_port(service: str) -> int:
    text = (ROOT / f"deploy/docker/etc/{service}.toml").read_text()
    return int(tomllib.loads(text)["server"]["metrics_port"])


def test_grafana_finds_its_dashboard_and_the_dashboard_its_prometheus():
    """What the container would read, as it is mounted: Grafana itself is not run here."""
    grafana = services_of(BASE)["grafana"]
    mounts = dict(reversed(m.removesuffix(":ro").split(":")) for m in grafana["volumes"])
    provisioning = ROOT / mounts["/etc/grafana/provisioning"]
    (provider,) = load(provisioning / "dashboards/flexmarl.yml")["providers"]
    assert provider["type"] == "file"
    (board,) = (ROOT / mounts[provider["options"]["path"]]).glob("*.json")
    asked = {panel["datasource"]["uid"] for panel in panels(json.loads(board.read_text()))}
    (source,) = load(provisioning / "datasources/prometheus.yml")["datasources"]
    assert asked == {source["uid"]}
    assert (source["type"], source["access"]) == ("prometheus", "proxy")
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert services_of(BASE)[host]["ports"][0].endswith(f":{port}")


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that draw something."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_gpus_are_given_to_one_service_each():
    reserved = {
        name: service["deploy"]["resources"]["reservations"]["devices"]
        for name, service in services_of(ROOT / "deploy/compose/gpu.yml").items()
    }
    assert set(reserved) == {"engine-host", "trainer"}
    for devices in reserved.values():
        (device,) = devices
        assert device.keys() == {"driver", "device_ids", "capabilities"}
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    ids = [device["device_ids"][0] for (device,) in reserved.values()]
    assert len(set(ids)) == len(ids)
    for each in ids:
        assert re.fullmatch(r"\$\{[A-Z]+_GPU:-\d\}", each)


def test_an_image_is_built_for_one_service_and_pulled_for_none():
    for chosen in COMBINATIONS:
        built: list[str] = []
        for name in {name for file in (BASE, *chosen) for name in services_of(file)}:
            parts = [services_of(file).get(name, {}) for file in (BASE, *chosen)]
            image = [part["image"] for part in parts if "image" in part][-1]
            if not image.startswith("flexmarl-"):
                continue
            if any("build" in part for part in parts):
                built.append(image)
            else:
                assert [part["pull_policy"] for part in parts if "pull_policy" in part] == ["never"]
        assert len(built) == len(set(built))


def test_ranks_of_both_trainers_find_each_other():
    trainers = {
        name: service["environment"]
        for name, service in services_of(ROOT / "deploy/compose/trainers.yml").items()
        if name.startswith("trainer")
    }
    assert len(trainers) == 2
    for name, environment in trainers.items():
        assert environment["FLEXMARL_TRAINER__RENDEZVOUS_HOST"] == name
        assert environment["FLEXMARL_TRAINER__INTERFACE"] != "lo"


@pytest.mark.skipif(
    compose_command() is None, reason="neither docker compose nor docker-compose is here"
)
@pytest.mark.parametrize("chosen", [(), tuple(OVERLAYS)], ids=["alone", "all"])
def test_compose_takes_the_files(chosen):
    command = compose_command()
    assert command is not None
    files = [part for file in (BASE, *chosen) for part in ("-f", str(file))]
    done = subprocess.run(
        [*command, *files, "--project-directory", str(ROOT), "config", "--quiet"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COMPOSE_PROJECT_NAME": "flexmarl-test"},
    )
    assert done.returncode == 0, done.stderr
