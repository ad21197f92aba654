"""Watching a run to its end while its orchestrator breaks, comes back, or forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from cli.recorded import message, report

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2 as pb
from flexmarl.api.orchestrator.v1 import orchestrator_pb2_grpc as pb_grpc
from flexmarl.cli.errors import CliError
from flexmarl.cli.follow import follow_run
from flexmarl.cli.interrupt import Interrupted, InterruptGuard
from flexmarl.cli.session import failed_line
from flexmarl.client.orchestrator import OrchestratorClient

HOME = common_pb2.ShardAddress(name="s0", address="127.0.0.1:1")
Script = Callable[[pb.WatchProgressRequest], list[pb.WatchProgressResponse | grpc.StatusCode]]


def ended(status: int, *reports: pb.VersionReport) -> pb.WatchProgressResponse:
    last = message(*reports)
    last.progress.status = status
    return last


class ScriptedOrchestrator(pb_grpc.OrchestratorServiceServicer):
    """Answers each watch from the next script; a status code ends that stream."""

    def __init__(self, *scripts: list[pb.WatchProgressResponse | grpc.StatusCode]) -> None:
        self.scripts = list(scripts)
        self.asked_from: list[int] = []
        self.resumed: list[str] = []

    async def WatchProgress(self, request, context) -> AsyncIterator[pb.WatchProgressResponse]:
        self.asked_from.append(request.from_version)
        for step in self.scripts.pop(0):
            if isinstance(step, grpc.StatusCode):
                await context.abort(step, "as written")
            yield step

    async def ResumeRun(self, request, context) -> pb.ResumeRunResponse:
        self.resumed.append(request.run_id)
        return pb.ResumeRunResponse()


async def follow(service: ScriptedOrchestrator, *, patience_s: float = 30.0):
    server = grpc.aio.server()
    pb_grpc.add_OrchestratorServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    versions: list[int] = []
    try:
        async with OrchestratorClient.connect(f"127.0.0.1:{port}") as client:
            progress = await follow_run(
                client,
                "r",
                home_shard=HOME,
                on_message=lambda m: versions.extend(r.version for r in m.reports),
                patience_s=patience_s,
            )
    finally:
        await server.stop(None)
    return progress, versions


async def test_every_version_comes_once_across_a_break():
    service = ScriptedOrchestrator(
        [message(report(0, 0.1)), message(report(1, 0.2)), grpc.StatusCode.UNAVAILABLE],
        [message()],  # a stream that ends without saying how the run did
        [ended(common_pb2.RUN_STATUS_FINISHED, report(2, 0.3))],
    )
    progress, versions = await follow(service)
    assert progress.status == common_pb2.RUN_STATUS_FINISHED
    assert versions == [0, 1, 2]
    assert service.asked_from == [0, 2, 2]


async def test_an_orchestrator_that_forgot_the_run_is_told_to_resume_it():
    service = ScriptedOrchestrator(
        [message(report(0, 0.1)), grpc.StatusCode.UNAVAILABLE],
        [grpc.StatusCode.NOT_FOUND],
        [ended(common_pb2.RUN_STATUS_FINISHED)],
    )
    await follow(service)
    assert service.resumed == ["r"]


@pytest.mark.parametrize("status", [common_pb2.RUN_STATUS_FAILED, common_pb2.RUN_STATUS_STOPPED])
async def test_other_ends_are_ends(status: int):
    progress, _ = await follow(ScriptedOrchestrator([ended(status)]))
    assert progress.status == status


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [("WORKFLOW_RAISED", "train again"), ("CHILD_DIED", "flexmarl resume quickstart-1")],
)
def test_a_failed_run_says_what_helps(reason: str, remedy: str):
    progress = message().progress
    progress.failure.reason = reason
    progress.failure.message = "flow.py:3 raised"
    line = failed_line(progress)
    assert "failed at version 2: flow.py:3 raised" in line
    assert remedy in line


def test_code_that_never_worked_is_not_resumed():
    progress = message().progress
    progress.failure.reason = "REWARD_RAISED"
    assert "or, if the code is right, go on with: flexmarl resume" in failed_line(progress)
    progress.version = 0
    assert "resume" not in failed_line(progress)


async def test_silence_ends_with_what_to_do():
    service = ScriptedOrchestrator(*[[grpc.StatusCode.UNAVAILABLE] for _ in range(50)])
    with pytest.raises(CliError, match="flexmarl resume r") as caught:
        await follow(service, patience_s=0.5)
    assert caught.value.exit_code == 1


async def test_the_first_signal_cancels_the_work():
    import os
    import signal

    cleaned = asyncio.Event()

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(30)
        finally:
            cleaned.set()

    async with InterruptGuard() as guard:
        with pytest.raises(Interrupted):
            await guard.run(work())
    assert cleaned.is_set()
