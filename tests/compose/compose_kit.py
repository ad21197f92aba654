"""A cluster in containers: built, brought up, hurt, and removed, through the command line alone."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

from integration.cluster_harness import eventually
from integration.whole_run import num_reports
from ports import own_port
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
BUILD_S = 1800
UP_S = 300


@functools.cache
def compose_command() -> list[str] | None:
    """The command that is here: the plugin, or version 1."""
    for command in (["docker", "compose"], ["docker-compose"]):
        try:
            done = subprocess.run(
                [*command, "version"], capture_output=True, timeout=30, check=False
            )
        except OSError:
            continue
        if done.returncode == 0:
            return command
    return None


def what_is_missing() -> str:
    """Why no container can be started here; empty when one can."""
    if compose_command() is None:
        return "neither docker compose nor docker-compose is installed"
    done = subprocess.run(
        ["docker", "info"], capture_output=True, text=True, timeout=30, check=False
    )
    # The client prints its own facts, and leaves with 0, when no engine answers.
    if done.returncode or "Server Version" not in done.stdout:
        return "no container engine answers"
    return ""


class Containers:
    """One project of compose: the cluster of the repository's file, and a folder for its runs.

    Args:
        project: Name of the project; its containers, volumes and network carry it.
        runs: Folder of this host for what the client writes.
        files: Further compose files.
    """

    def __init__(self, project: str, runs: Path, *, files: Sequence[Path] = ()) -> None:
        command = compose_command()
        assert command is not None
        self._compose = [*command, "--project-directory", str(ROOT), "-p", project]
        for file in (ROOT / "docker-compose.yml", *files):
            self._compose += ["-f", str(file)]
        self._network = f"{project}_default"
        self.runs = runs
        runs.mkdir(parents=True, exist_ok=True)
        runs.chmod(0o777)  # the client's user is another one
        # Another cluster's page may have the usual port.
        port = os.environ.get("PROMETHEUS_PORT", str(own_port()))
        self._environment = {**os.environ, "FLEXMARL_RUNS": str(runs), "PROMETHEUS_PORT": port}

    def run(self, *arguments: str, timeout_s: float = 120) -> str:
        """Run one command of compose to its end."""
        done = subprocess.run(
            [*self._compose, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=self._environment,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    def build(self) -> None:
        """Build every image."""
        self.run("build", timeout_s=BUILD_S)
        self.run("build", "client", timeout_s=BUILD_S)  # a profile's: it is not built with the rest

    def up(self, *services: str) -> None:
        """Start services and wait until they are healthy."""
        self.run("up", "-d", *services, timeout_s=UP_S)
        end = time.monotonic() + UP_S
        while waiting := [name for name in services if self.health(name) != "healthy"]:
            assert time.monotonic() < end, f"not healthy: {waiting}\n{self.logs(*waiting)}"
            time.sleep(0.5)

    def down(self) -> None:
        """Remove containers, volumes and network."""
        self.run("down", "-v", "--remove-orphans")

    def train(self, run_id: str, *sets: str) -> subprocess.Popen[str]:
        """Start a run of the quickstart in the client's container."""
        command = ["flexmarl", "train", "examples/quickstart/config.toml", "--run-id", run_id]
        for item in sets:
            command += ["--set", item]
        return subprocess.Popen(
            [*self._compose, "run", "--rm", "-T", "client", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
        )

    async def reaches(self, client: subprocess.Popen[str], run_id: str, version: int) -> None:
        """Wait until a run that goes on has this version."""

        def is_there_or_never_will_be() -> bool:
            return num_reports(self.runs / run_id) >= version or client.poll() is not None

        await eventually(
            is_there_or_never_will_be,
            what=f"version {version} of {run_id}",
            timeout_s=300,
            every_s=0.5,
        )
        assert client.poll() is None, client.communicate()[0]

    def client(self, *arguments: str) -> str:
        """What a command prints in the client's container."""
        return self.run("run", "--rm", "-T", "client", "flexmarl", *arguments)

    def metric(self, service: str, port: int, name: str, **labels: str) -> float:
        """Sum of a service's metric, over all series with these labels."""
        address = f"http://{self.address(service)}:{port}/metrics"
        with urllib.request.urlopen(address, timeout=20) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def scraped(self) -> set[str]:
        """Services that Prometheus reads."""
        url = f"http://{self.address('prometheus')}:9090/api/v1/query?query=up"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            return set()
        return {series["metric"]["instance"] for series in found if series["value"][1] == "1"}

    def container(self, service: str) -> str:
        """Id of a service's container, whether it runs or not."""
        label = f"label=com.docker.compose.service={service}"
        project = f"label=com.docker.compose.project={self._network.removesuffix('_default')}"
        listed = docker("ps", "-aq", "--no-trunc", "--filter", label, "--filter", project)
        return listed.split()[0]

    def health(self, service: str) -> str:
        """What the engine says of it: starting, healthy, unhealthy; or that it does not run."""
        state = self._inspect(service)["State"]
        return str(state["Health"]["Status"] if state["Running"] else state["Status"])

    def restarts(self, service: str) -> int:
        """How often the engine started it again."""
        return int(self._inspect(service)["RestartCount"])

    def address(self, service: str) -> str:
        """Its address in the network of the containers, which this host reaches."""
        networks = self._inspect(service)["NetworkSettings"]["Networks"]
        return str(networks[self._network]["IPAddress"])

    def kill(self, service: str) -> None:
        """`kill -9` of the container's first process: all others of it go with it."""
        # Not `docker kill`: what a person ended, the engine does not start again.
        os.kill(int(self._inspect(service)["State"]["Pid"]), signal.SIGKILL)

    @contextmanager
    def cut(self, service: str):
        """The service off the network for as long as the block takes."""
        container = self.container(service)
        docker("network", "disconnect", self._network, container)
        try:
            yield
        finally:
            docker("network", "connect", "--alias", service, self._network, container)

    def logs(self, *services: str, lines: int = 30) -> str:
        """The last lines of their logs."""
        return self.run("logs", "--no-color", f"--tail={lines}", *services)

    def _inspect(self, service: str) -> dict:
        return json.loads(docker("inspect", self.container(service)))[0]


def docker(*arguments: str) -> str:
    """Run one command of the engine's client."""
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout
