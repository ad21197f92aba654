"""The RPCs of the dispatcher: parse, call the handler, convert."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from flexmarl.api.rollout.v1 import rollout_pb2 as pb
from flexmarl.api.rollout.v1.engine_pb2 import (
    ConnectEngineHostRequest,
    ConnectEngineHostResponse,
)
from flexmarl.api.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer
from flexmarl.rollout.dispatcher.hosts import Hosts
from flexmarl.rollout.dispatcher.rollout import Rollout
from flexmarl.runtime.ticks import interval_s, ticks

SERVICE: Final = "flexmarl.api.rollout.v1.RolloutService"


class RolloutServicer(RolloutServiceServicer):
    """See the contract; decides nothing."""

    def __init__(self, rollout: Rollout, hosts: Hosts) -> None:
        self._rollout = rollout
        self._hosts = hosts
        self._stopping = asyncio.Event()

    async def OpenRun(self, request: pb.OpenRunRequest, context: Any) -> pb.OpenRunResponse:  # noqa: ANN401, N802
        """See the contract."""
        incarnation = await self._rollout.open_run(request.run_id, request.shards, request.term)
        return pb.OpenRunResponse(incarnation=incarnation)

    async def CloseRun(self, request: pb.CloseRunRequest, context: Any) -> pb.CloseRunResponse:  # noqa: ANN401, N802
        """See the contract."""
        await self._rollout.close_run(request.run_id, request.term)
        return pb.CloseRunResponse()

    async def StartSamples(  # noqa: N802
        self,
        request: pb.StartSamplesRequest,
        context: Any,  # noqa: ANN401
    ) -> pb.StartSamplesResponse:
        """See the contract."""
        incarnation = self._rollout.start_samples(request.run_id, request.term, request.samples)
        return pb.StartSamplesResponse(incarnation=incarnation)

    async def CancelSamples(  # noqa: N802
        self,
        request: pb.CancelSamplesRequest,
        context: Any,  # noqa: ANN401
    ) -> pb.CancelSamplesResponse:
        """See the contract."""
        await self._rollout.cancel_samples(request.run_id, request.term, request.sample_ids)
        return pb.CancelSamplesResponse()

    async def ComputeAdvantages(  # noqa: N802
        self,
        request: pb.ComputeAdvantagesRequest,
        context: Any,  # noqa: ANN401
    ) -> pb.ComputeAdvantagesResponse:
        """See the contract; waits for a reward process, at most as long as the caller does."""
        scopes = await self._rollout.compute_advantages(
            request.run_id, request.term, request.group_id, request.scopes
        )
        return pb.ComputeAdvantagesResponse(scopes=scopes)

    async def PrepareWeights(  # noqa: N802
        self,
        request: pb.PrepareWeightsRequest,
        context: Any,  # noqa: ANN401
    ) -> pb.PrepareWeightsResponse:
        """See the contract."""
        self._rollout.prepare_weights(
            request.run_id, request.term, request.version, dict(request.policies)
        )
        return pb.PrepareWeightsResponse()

    async def ActivateVersion(  # noqa: N802
        self,
        request: pb.ActivateVersionRequest,
        context: Any,  # noqa: ANN401
    ) -> pb.ActivateVersionResponse:
        """See the contract."""
        self._rollout.activate_version(request.run_id, request.term, request.manifest)
        return pb.ActivateVersionResponse()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:  # noqa: ANN401, N802
        """See the contract."""
        return pb.GetStatusResponse(status=self._rollout.status(request.run_id))

    async def WatchStatus(  # noqa: N802
        self,
        request: pb.WatchStatusRequest,
        context: Any,  # noqa: ANN401
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        """See the contract; waits for the interval to pass, or for the service to stop."""
        async for _ in ticks(interval_s(request.interval_ms), until=self._stopping):
            yield pb.WatchStatusResponse(status=self._rollout.status(request.run_id))

    async def ConnectEngineHost(  # noqa: N802
        self,
        request_iterator: AsyncIterator[ConnectEngineHostRequest],
        context: Any,  # noqa: ANN401
    ) -> AsyncIterator[ConnectEngineHostResponse]:
        """See the contract."""
        async for response in self._hosts.serve(request_iterator):
            yield response

    def stop(self) -> None:
        """Ends the long-lived streams."""
        self._stopping.set()
        self._hosts.close()
