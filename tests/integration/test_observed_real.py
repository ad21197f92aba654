"""A short real run, watched: timeline, `flexmarl top`, and the dashboard on a real Prometheus."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from integration.cluster_harness import Cluster, Size, eventually, run_cli
from ports import own_port

from flexmarl.cli.cluster.plan import SERVICES
from scripts.reference.dashboard import expressions
from scripts.reference.metrics_page import DECLARED

pytestmark = pytest.mark.real

RUN = "watched"
SIZE = Size(versions=40)
"""Four a second on a fast machine, in which Prometheus looks twice; a rate needs several looks."""
# The splitter has far more instances than its share of the work, and the sorter's calls wait for
# its only one: some instances move, however fast the machine is.
CROWDED = [
    part
    for item in (
        "policies.splitter.rollout.instances=4",
        "policies.sorter.rollout.instances=1",
        "policies.sorter.rollout.max_concurrency=2",
        "rollout.balance.rule=queue_gap",
        "rollout.balance.interval_s=0.02",
    )
    for part in ("--set", item)
]
TRACKS = {
    "batches", "instances", "queues", "policies", "slots", "swaps", "moves", "weights",
    "orchestrator",
}  # fmt: skip
MAY_BE_EMPTY = {
    "Alarms, last 5 minutes",
    "Void rows, last 5 minutes",
    "Failures, last 5 minutes",
    "Calls that failed, last 5 minutes",
}
"""Panels that show nothing while all is well."""

PROMETHEUS = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason="no prometheus here: apt-get install prometheus"
)


class Prometheus:
    """A real one, where it is installed; it scrapes often enough for a run of seconds."""

    def __init__(self, folder: Path, targets: dict[str, int]) -> None:
        self._port = own_port()
        self._folder = folder
        jobs = [
            {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            for name, port in targets.items()
        ]
        self._config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
            "scrape_configs": jobs,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.started_s = time.time()

    def start(self) -> None:
        if PROMETHEUS is None:
            return
        self._folder.mkdir()
        config = self._folder / "prometheus.yml"
        config.write_text(json.dumps(self._config))  # YAML takes JSON
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    PROMETHEUS,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)

    def ask(self, path: str, **parameters: object) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)

    def over_the_run(self, expression: str) -> list[dict[str, Any]]:
        """Curves of an expression from the start until now."""
        answer = self.ask(
            "query_range", query=expression, start=self.started_s, end=time.time(), step=1
        )
        assert answer["status"] == "success", answer
        return answer["data"]["result"]


class Watched:
    """The cluster with a finished run on it."""

    def __init__(self, cluster: Cluster, prometheus: Prometheus, seen: dict[str, Any]) -> None:
        self.cluster = cluster
        self.prometheus = prometheus
        self.seen = seen

    def metrics(self, service: str) -> str:
        """What a service exposes now."""
        file = self.cluster.folder / "services" / service / "address.json"
        port = json.loads(file.read_text())["metrics_port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return answer.read().decode()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    cluster = Cluster(folder / "cluster")
    ports = {name: own_port() for name in SERVICES}
    prometheus = Prometheus(folder / "prometheus", ports)
    cluster.up(**{f"{name}__server__metrics_port": port for name, port in ports.items()})
    try:
        prometheus.start()
        client = cluster.train(RUN, SIZE, folder / "runs", *CROWDED)
        said, _ = client.communicate(timeout=120)
        assert client.returncode == 0, said
        shown = run_cli("top", "--json", "--data-dir", str(cluster.folder))
        assert shown.returncode == 0, shown.stderr
        yield Watched(cluster, prometheus, json.loads(shown.stdout))
    finally:
        prometheus.stop()
        cluster.down()
    assert cluster.outlived() == []


@pytest.fixture
async def events(watched: Watched, tmp_path: Path) -> list[dict[str, Any]]:
    """The timeline; services write their spans every few seconds, so it is asked for again."""
    out = tmp_path / "trace.json"

    def read() -> list[dict[str, Any]]:
        where = ("--data-dir", str(watched.cluster.folder))
        done = run_cli("timeline", RUN, "--out", str(out), *where)
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
        return found if processes(found).keys() >= TRACKS else []

    return await eventually(read, what=f"the tracks {sorted(TRACKS)}", every_s=1.0)


def processes(events: list[dict[str, Any]]) -> dict[str, int]:
    return {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}


async def test_the_timeline_has_every_kind_of_track(events: list[dict[str, Any]]) -> None:
    found = processes(events)
    names = defaultdict(set)
    for event in events:
        if event["ph"] == "X":
            names[event["pid"]].add(event["name"])
    batches = names[found["batches"]]
    assert {f"batch {number}" for number in range(SIZE.versions)} <= batches
    assert {"hand over", "rollout", "training tail", "commit"} <= batches
    assert {"splitter", "sorter", "merger"} <= names[found["instances"]]
    assert {"Bind", "Compute", "Apply"} <= names[found["policies"]]
    assert any(name.endswith("gradients") for name in names[found["slots"]])
    assert any(name.endswith("swap in") for name in names[found["swaps"]])
    assert any(" to " in name for name in names[found["moves"]])


async def test_spans_of_a_track_nest_or_follow_one_another(events: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"], event["name"])
            threads[event["pid"], event["tid"]].append(span)
    assert threads
    rounding_us = 0.01
    for spans in threads.values():
        around: list[tuple[float, float, str]] = []
        for span in sorted(spans, key=lambda s: (s[0], -s[1])):
            while around and around[-1][1] <= span[0] + rounding_us:
                around.pop()
            assert not around or span[1] <= around[-1][1] + rounding_us, (around[-1], span)
            around.append(span)


def test_top_names_the_run_without_being_told_which(watched: Watched) -> None:
    seen = watched.seen
    assert (seen["run"], seen["version"], seen["status"]) == (RUN, SIZE.versions, "finished")
    assert seen["policies"].keys() == {"splitter", "sorter", "merger"}
    assert {slot["slot"] for slot in seen["slots"]} == {"slot0", "slot1"}
    assert seen["newest"]["step/rollout_s"] > 0


@pytest.mark.parametrize(("service", "title"), list(zip(SERVICES, list(DECLARED)[1:], strict=True)))
def test_a_service_exposes_what_it_declares(watched: Watched, service: str, title: str) -> None:
    text = watched.metrics(service)
    names = [spec.name for spec in (*DECLARED["Every service"], *DECLARED[title])]
    assert [name for name in names if f"# HELP {name} " not in text] == []
    assert 'flexmarl_rpc_finished_total{code="OK"' in text or service == "engine_host"


def test_sums_of_a_run_are_whole(watched: Watched) -> None:
    vertices = SIZE.versions * SIZE.vertices
    text = watched.metrics("orchestrator")
    rows = [line for line in text.splitlines() if line.startswith("flexmarl_orchestrator_rows_to")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in rows) == vertices
    assert f"flexmarl_orchestrator_steps_total {SIZE.versions}.0" in text


@needs_prometheus
async def test_prometheus_reaches_every_service(watched: Watched) -> None:
    def up() -> bool:
        targets = watched.prometheus.ask("targets")["data"]["activeTargets"]
        return len(targets) == len(SERVICES) and all(t["health"] == "up" for t in targets)

    await eventually(up, what="all targets are up")


@needs_prometheus
@pytest.mark.parametrize(("title", "expression"), list(expressions()))
async def test_the_dashboard_shows_the_run(watched: Watched, title: str, expression: str) -> None:
    def curves() -> bool:
        return bool(watched.prometheus.over_the_run(expression)) or title in MAY_BE_EMPTY

    # What was scraped last may still be on its way into what is asked.
    await eventually(curves, what=f"{title}: something to see of {expression}", timeout_s=10)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: see prometheus")
def test_the_shipped_configuration_is_valid() -> None:
    config = Path(__file__).parents[2] / "deploy/prometheus/prometheus.yml"
    done = subprocess.run(
        ["promtool", "check", "config", str(config)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stdout + done.stderr
