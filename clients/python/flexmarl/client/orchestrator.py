"""The Orchestrator's typed client: submit, resume, stop and watch runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Final, Self

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.orchestrator.v1alpha1 import orchestrator_pb2 as pb
from flexmarl.api.orchestrator.v1alpha1.orchestrator_pb2_grpc import OrchestratorServiceStub
from flexmarl.client.channel import Channel, connect
from flexmarl.client.request import new_request_id

_SERVICE: Final = "/flexmarl.api.orchestrator.v1alpha1.OrchestratorService"
SUBMIT_DEADLINE_S: Final = 60.0
"""Submit and resume read the run from its store, which may be starting."""


class OrchestratorClient:
    """Client of one orchestrator; use it as an asynchronous context manager.

    Args:
        target: `host:port`, or a channel that the caller owns.
    """

    def __init__(self, target: str | Channel) -> None:
        self._owned: Channel | None = None
        if isinstance(target, str):
            target = self._owned = connect(
                target,
                deadlines_s={
                    f"{_SERVICE}/SubmitRun": SUBMIT_DEADLINE_S,
                    f"{_SERVICE}/ResumeRun": SUBMIT_DEADLINE_S,
                    f"{_SERVICE}/StopRun": SUBMIT_DEADLINE_S,
                    f"{_SERVICE}/WatchProgress": None,
                },
            )
        self.address = target.address
        self._stub: Any = OrchestratorServiceStub(target)

    async def close(self) -> None:
        """Close the connection, if it was opened here."""
        if self._owned is not None:
            await self._owned.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def submit_run(
        self, run_id: str, *, home_shard: common_pb2.ShardAddress
    ) -> pb.RunProgress:
        """Start a run that its client has stored."""
        request = pb.SubmitRunRequest(
            request_id=new_request_id(), run_id=run_id, home_shard=home_shard
        )
        response: pb.SubmitRunResponse = await self._stub.SubmitRun(request)
        return response.progress

    async def resume_run(
        self, run_id: str, *, home_shard: common_pb2.ShardAddress
    ) -> pb.RunProgress:
        """Go on with a run from its last committed version."""
        request = pb.ResumeRunRequest(
            request_id=new_request_id(), run_id=run_id, home_shard=home_shard
        )
        response: pb.ResumeRunResponse = await self._stub.ResumeRun(request)
        return response.progress

    async def stop_run(self, run_id: str, *, finish_batch: bool = False) -> pb.RunProgress:
        """Stop a run at once, or after the commit of its open batch; it can be resumed."""
        mode = pb.STOP_MODE_FINISH_BATCH if finish_batch else pb.STOP_MODE_NOW
        request = pb.StopRunRequest(request_id=new_request_id(), run_id=run_id, mode=mode)
        response: pb.StopRunResponse = await self._stub.StopRun(request)
        return response.progress

    async def get_run_status(self, run_id: str) -> pb.RunProgress:
        """Where a run stands."""
        response: pb.GetRunStatusResponse = await self._stub.GetRunStatus(
            pb.GetRunStatusRequest(run_id=run_id)
        )
        return response.progress

    async def watch_progress(
        self, run_id: str, *, from_version: int = 0, interval_ms: int = 500
    ) -> AsyncIterator[pb.WatchProgressResponse]:
        """Reports of committed versions and the present state, until the run ends.

        Waits for the orchestrator, which sends at least every `interval_ms`; freed by the end of
        the run, by an error, or by closing the iterator.
        """
        request = pb.WatchProgressRequest(
            run_id=run_id, from_version=from_version, interval_ms=interval_ms
        )
        call = self._stub.WatchProgress(request)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()
