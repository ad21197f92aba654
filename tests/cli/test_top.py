"""`flexmarl top` on an orchestrator that answers as a run goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from cli.recorded import message, report

from flexmarl.api.orchestrator.v1 import orchestrator_pb2 as pb
from flexmarl.api.orchestrator.v1 import orchestrator_pb2_grpc as pb_grpc
from flexmarl.cli.commands.top import top
from flexmarl.cli.errors import CliError


class RunGoesOn(pb_grpc.OrchestratorServiceServicer):
    """Knows one run, at version 2."""

    def __init__(self) -> None:
        self.asked: list[pb.WatchProgressRequest] = []
        self.over = threading.Event()

    def GetRunStatus(self, request, context) -> pb.GetRunStatusResponse:
        if request.run_id != "quickstart-1":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no run {request.run_id!r}")
        return pb.GetRunStatusResponse(progress=message().progress)

    def WatchProgress(self, request, context) -> Iterator[pb.WatchProgressResponse]:
        self.asked.append(request)
        # Before the first answer: who leaves upon it ends the handler where it yields.
        if not context.add_callback(self.over.set):
            self.over.set()
        first = message(report(0, 0.125), report(1, 0.25))
        first.progress.reasons.add(what="store: commit version 3", waited_ms=2500, ends="it does")
        yield first
        self.over.wait(30)


@pytest.fixture
def orchestrator() -> Iterator[tuple[RunGoesOn, list[str]]]:
    service = RunGoesOn()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_OrchestratorServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, ["store=127.0.0.1:1", f"orchestrator=127.0.0.1:{port}"]
    server.stop(None)


def look(cluster: list[str], *, run: str = "quickstart-1", as_json: bool = False) -> int:
    return top(run, data_dir=Path("nowhere"), cluster=cluster, once=True, as_json=as_json)


def test_once_shows_the_screen_of_the_training_command(orchestrator, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    service, cluster = orchestrator
    assert look(cluster) == 0
    said = capsys.readouterr().out
    for part in ("version 2/60", "sorter-0 v2 serving", "slot0: sorter gradients", "rollout 0.75"):
        assert part in said
    assert "waits for store: commit version 3 (2.5 s)" in said
    assert service.asked[0].from_version == 0
    assert service.over.wait(30), "the stream is given back"


def test_json_has_all_that_the_screen_has(orchestrator, capsys):
    _, cluster = orchestrator
    assert look(cluster, as_json=True) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["policies"] == {"sorter": {"waiting": 7, "running": 9, "rows_waiting": 12}}
    assert seen["instances"][0]["state"] == "serving"
    assert seen["slots"][1] == {"slot": "slot1", "policy": None, "activity": None, "busy_s": 0.0}
    assert seen["newest"]["step/rollout_s"] == 0.75
    assert seen["waits"][0]["waited_s"] == 2.5


def test_a_run_that_nobody_drives_is_one_line(orchestrator):
    _, cluster = orchestrator
    with pytest.raises(CliError, match="flexmarl resume other"):
        look(cluster, run="other")


def test_an_orchestrator_that_is_away_is_one_line():
    with pytest.raises(CliError, match="does not answer"):
        look(["store=127.0.0.1:1", "orchestrator=127.0.0.1:1"])
