"""OrchestratorService: parse, call a room, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, TypeAlias

import grpc

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2 as pb
from flexmarl.api.orchestrator.v1.orchestrator_pb2_grpc import OrchestratorServiceServicer
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import check_name
from flexmarl.orchestrator.runs import Runs
from flexmarl.runtime.ticks import interval_s

SERVICE: Final = "flexmarl.api.orchestrator.v1.OrchestratorService"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Servicer(OrchestratorServiceServicer):
    """The methods of the service."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def SubmitRun(  # noqa: N802
        self, request: pb.SubmitRunRequest, _context: Context
    ) -> pb.SubmitRunResponse:
        """Start a stored run."""
        home = _home(request.run_id, request.home_shard)
        progress = await self._runs.begin(request.run_id, home, resume=False)
        return pb.SubmitRunResponse(progress=progress)

    async def ResumeRun(  # noqa: N802
        self, request: pb.ResumeRunRequest, _context: Context
    ) -> pb.ResumeRunResponse:
        """Go on with a stored run."""
        home = _home(request.run_id, request.home_shard)
        progress = await self._runs.begin(
            request.run_id, home, resume=True, config_json=request.config_json
        )
        return pb.ResumeRunResponse(progress=progress)

    async def StopRun(  # noqa: N802
        self, request: pb.StopRunRequest, _context: Context
    ) -> pb.StopRunResponse:
        """Stop a run."""
        finish_batch = request.mode == pb.STOP_MODE_FINISH_BATCH
        progress = await self._runs.stop(request.run_id, finish_batch=finish_batch)
        return pb.StopRunResponse(progress=progress)

    async def DeleteRun(  # noqa: N802
        self, request: pb.DeleteRunRequest, _context: Context
    ) -> pb.DeleteRunResponse:
        """Remove a run."""
        await self._runs.delete(request.run_id, _home(request.run_id, request.home_shard))
        return pb.DeleteRunResponse()

    async def GetRunStatus(  # noqa: N802
        self, request: pb.GetRunStatusRequest, _context: Context
    ) -> pb.GetRunStatusResponse:
        """Where a run stands."""
        return pb.GetRunStatusResponse(progress=self._runs.progress(request.run_id))

    async def WatchProgress(  # noqa: N802
        self, request: pb.WatchProgressRequest, _context: Context
    ) -> AsyncIterator[pb.WatchProgressResponse]:
        """Stream a run's reports and states."""
        async for response in self._runs.watch(
            request.run_id,
            from_version=request.from_version,
            interval_s=interval_s(request.interval_ms),
        ):
            yield response


def _home(run_id: str, home: common_pb2.ShardAddress) -> common_pb2.ShardAddress:
    check_name(run_id, what="run id")
    if not home.address:
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            "home_shard.address is missing: host:port of the run's first store shard",
        )
    return home
