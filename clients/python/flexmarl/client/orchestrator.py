"""The Orchestrator's typed client: submit, resume, stop, delete and watch runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2 as pb
from flexmarl.api.orchestrator.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from flexmarl.client.base import ServiceClient
from flexmarl.client.errors import UnavailableError
from flexmarl.client.request import new_request_id


class OrchestratorClient(ServiceClient):
    """Client of one orchestrator; see `ServiceClient` for its arguments."""

    STUB = OrchestratorServiceStub
    REPEATED = (UnavailableError,)

    async def submit_run(
        self, run_id: str, *, home_shard: common_pb2.ShardAddress
    ) -> pb.RunProgress:
        """Start a run that its client has stored."""
        request = pb.SubmitRunRequest(
            request_id=new_request_id(), run_id=run_id, home_shard=home_shard
        )
        response: pb.SubmitRunResponse = await self._call("SubmitRun", request)
        return response.progress

    async def resume_run(
        self, run_id: str, *, home_shard: common_pb2.ShardAddress, config_json: bytes = b""
    ) -> pb.RunProgress:
        """Go on with a run from its last committed version, with other settings if given."""
        request = pb.ResumeRunRequest(
            request_id=new_request_id(),
            run_id=run_id,
            home_shard=home_shard,
            config_json=config_json,
        )
        response: pb.ResumeRunResponse = await self._call("ResumeRun", request)
        return response.progress

    async def stop_run(self, run_id: str, *, finish_batch: bool = False) -> pb.RunProgress:
        """Stop a run at once, or after the commit of its open batch; it can be resumed."""
        mode = pb.STOP_MODE_FINISH_BATCH if finish_batch else pb.STOP_MODE_NOW
        request = pb.StopRunRequest(request_id=new_request_id(), run_id=run_id, mode=mode)
        response: pb.StopRunResponse = await self._call("StopRun", request)
        return response.progress

    async def delete_run(self, run_id: str, *, home_shard: common_pb2.ShardAddress) -> None:
        """Remove a run that is not driven from all its store shards; one that is gone is fine.

        Raises:
            RefusedError: STATE_TRANSITION_REFUSED while it is driven.
        """
        request = pb.DeleteRunRequest(
            request_id=new_request_id(), run_id=run_id, home_shard=home_shard
        )
        await self._call("DeleteRun", request)

    async def get_run_status(self, run_id: str) -> pb.RunProgress:
        """Where a run stands."""
        response: pb.GetRunStatusResponse = await self._call(
            "GetRunStatus", pb.GetRunStatusRequest(run_id=run_id)
        )
        return response.progress

    async def watch_progress(
        self, run_id: str, *, from_version: int = 0, interval_ms: int = 500
    ) -> AsyncGenerator[pb.WatchProgressResponse, None]:
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
