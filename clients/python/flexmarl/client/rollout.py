"""The Rollout dispatcher's typed client: one method per RPC that orchestrators and people call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.rollout.v1 import rollout_pb2 as pb
from flexmarl.api.rollout.v1.rollout_pb2_grpc import RolloutServiceStub
from flexmarl.client.base import ServiceClient
from flexmarl.client.request import new_request_id


class RolloutClient(ServiceClient):
    """Client of one dispatcher; see `ServiceClient` for its arguments."""

    STUB = RolloutServiceStub

    async def open_run(
        self, run_id: str, *, term: int, shards: Iterable[common_pb2.ShardAddress]
    ) -> str:
        """Open a run, or take it over under a newer term.

        Returns:
            The dispatcher's incarnation: another one than before knows nothing of earlier samples.
        """
        request = pb.OpenRunRequest(
            request_id=new_request_id(), run_id=run_id, term=term, shards=shards
        )
        response: pb.OpenRunResponse = await self._call("OpenRun", request)
        return response.incarnation

    async def close_run(self, run_id: str, *, term: int) -> None:
        """End workers and instances of a run."""
        request = pb.CloseRunRequest(request_id=new_request_id(), run_id=run_id, term=term)
        await self._call("CloseRun", request)

    async def start_samples(
        self, run_id: str, samples: Iterable[pb.SampleSpec], *, term: int
    ) -> str:
        """Admit samples; known ones are left alone. Returns the dispatcher's incarnation."""
        request = pb.StartSamplesRequest(
            request_id=new_request_id(), run_id=run_id, term=term, samples=samples
        )
        response: pb.StartSamplesResponse = await self._call("StartSamples", request)
        return response.incarnation

    async def cancel_samples(self, run_id: str, sample_ids: Iterable[str], *, term: int) -> None:
        """Cut samples; unknown ones are ignored."""
        request = pb.CancelSamplesRequest(
            request_id=new_request_id(), run_id=run_id, term=term, sample_ids=sample_ids
        )
        await self._call("CancelSamples", request)

    async def compute_advantages(
        self,
        run_id: str,
        group_id: str,
        scopes: Iterable[Sequence[float]],
        *,
        term: int,
        timeout_s: float,
    ) -> list[list[float]]:
        """Ask the run's own estimator: an advantage for each reward of each scope."""
        request = pb.ComputeAdvantagesRequest(
            request_id=new_request_id(),
            run_id=run_id,
            term=term,
            group_id=group_id,
            scopes=[pb.RewardScope(values=values) for values in scopes],
        )
        response: pb.ComputeAdvantagesResponse = await self._call(
            "ComputeAdvantages", request, timeout_s=timeout_s
        )
        return [list(scope.values) for scope in response.scopes]

    async def prepare_weights(
        self,
        run_id: str,
        version: int,
        policies: Mapping[str, graph_pb2.PolicyManifest],
        *,
        term: int,
    ) -> None:
        """Announce weights of a coming version."""
        request = pb.PrepareWeightsRequest(
            request_id=new_request_id(),
            run_id=run_id,
            term=term,
            version=version,
            policies=policies,
        )
        await self._call("PrepareWeights", request)

    async def activate_version(
        self, run_id: str, manifest: graph_pb2.Manifest, *, term: int
    ) -> None:
        """Make a committed version the one to sample under."""
        request = pb.ActivateVersionRequest(
            request_id=new_request_id(), run_id=run_id, term=term, manifest=manifest
        )
        await self._call("ActivateVersion", request)

    async def get_status(self, run_id: str) -> pb.RolloutStatus:
        """Queues, instances and open samples of a run."""
        response: pb.GetStatusResponse = await self._call(
            "GetStatus", pb.GetStatusRequest(run_id=run_id)
        )
        return response.status

    async def watch_status(
        self, run_id: str, *, interval_s: float = 0.5
    ) -> AsyncGenerator[pb.RolloutStatus, None]:
        """The same at an interval, through restarts; compare the incarnation.

        Waits for the next status; freed by it, by a dispatcher that stays away (UNAVAILABLE) or
        does not know the run (NOT_FOUND), or by closing the iterator.
        """
        request = pb.WatchStatusRequest(run_id=run_id, interval_ms=int(interval_s * 1000))
        async with aclosing(self._follow(lambda: self._stub.WatchStatus(request))) as responses:
            async for response in responses:
                yield response.status
