"""The Rollout dispatcher's typed client: one method per RPC that orchestrators and people call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.meg_store.v1alpha1 import graph_pb2
from flexmarl.api.rollout.v1alpha1 import rollout_pb2 as pb
from flexmarl.api.rollout.v1alpha1.rollout_pb2_grpc import RolloutServiceStub
from flexmarl.client.channel import Channel, connect
from flexmarl.client.request import new_request_id
from flexmarl.core.retry import patient

PATIENCE_S: Final = 30.0
"""How long a call is repeated while the dispatcher is UNAVAILABLE, by default."""


class RolloutClient:
    """Client of one dispatcher.

    Args:
        channel: Connection to it.
        owns_channel: Close the channel with the client.
    """

    def __init__(self, channel: Channel, *, owns_channel: bool = False) -> None:
        self._channel = channel
        self._stub: Any = RolloutServiceStub(channel)
        self._owns_channel = owns_channel

    @classmethod
    def connect(cls, address: str, *, patience_s: float = PATIENCE_S) -> Self:
        """Client of the dispatcher at `host:port`; it connects on the first call.

        Args:
            address: Of the dispatcher.
            patience_s: How long calls are repeated while it is UNAVAILABLE, such as restarted.
        """
        return cls(connect(address, retry=patient(patience_s)), owns_channel=True)

    async def close(self) -> None:
        """Close the connection."""
        if self._owns_channel:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

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
        response: pb.OpenRunResponse = await self._stub.OpenRun(request)
        return response.incarnation

    async def close_run(self, run_id: str, *, term: int) -> None:
        """End workers and instances of a run."""
        request = pb.CloseRunRequest(request_id=new_request_id(), run_id=run_id, term=term)
        await self._stub.CloseRun(request)

    async def start_samples(
        self, run_id: str, samples: Iterable[pb.SampleSpec], *, term: int
    ) -> str:
        """Admit samples; known ones are left alone. Returns the dispatcher's incarnation."""
        request = pb.StartSamplesRequest(
            request_id=new_request_id(), run_id=run_id, term=term, samples=samples
        )
        response: pb.StartSamplesResponse = await self._stub.StartSamples(request)
        return response.incarnation

    async def cancel_samples(self, run_id: str, sample_ids: Iterable[str], *, term: int) -> None:
        """Cut samples; unknown ones are ignored."""
        request = pb.CancelSamplesRequest(
            request_id=new_request_id(), run_id=run_id, term=term, sample_ids=sample_ids
        )
        await self._stub.CancelSamples(request)

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
        await self._stub.PrepareWeights(request)

    async def activate_version(
        self, run_id: str, manifest: graph_pb2.Manifest, *, term: int
    ) -> None:
        """Make a committed version the one to sample under."""
        request = pb.ActivateVersionRequest(
            request_id=new_request_id(), run_id=run_id, term=term, manifest=manifest
        )
        await self._stub.ActivateVersion(request)

    async def get_status(self, run_id: str) -> pb.RolloutStatus:
        """Queues, instances and open samples of a run."""
        response: pb.GetStatusResponse = await self._stub.GetStatus(
            pb.GetStatusRequest(run_id=run_id)
        )
        return response.status

    async def watch_status(
        self, run_id: str, *, interval_s: float = 0.5
    ) -> AsyncIterator[pb.RolloutStatus]:
        """The same at an interval; ends, or raises UNAVAILABLE, when the dispatcher goes."""
        request = pb.WatchStatusRequest(run_id=run_id, interval_ms=int(interval_s * 1e3))
        async for response in self._stub.WatchStatus(request):
            yield response.status
