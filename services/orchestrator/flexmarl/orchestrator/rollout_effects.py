"""Effects on the Rollout dispatcher."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

from flexmarl.api.rollout.v1alpha1 import rollout_pb2 as pb
from flexmarl.api.rollout.v1alpha1.rollout_pb2_grpc import RolloutServiceStub
from flexmarl.client.channel import Channel
from flexmarl.client.errors import NotFoundError
from flexmarl.client.request import new_request_id
from flexmarl.core.ids import SampleId
from flexmarl.core.run_effects import (
    ActivateVersion,
    CancelSamples,
    OpenRollout,
    PrepareWeights,
    StartSamples,
)
from flexmarl.core.seeds import sample_seed
from flexmarl.orchestrator.calls import patiently
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.convert import policy_manifest

WITHOUT_DEADLINE: Final = ("/flexmarl.api.rollout.v1alpha1.RolloutService/WatchStatus",)
"""Streams that live as long as the run."""

OPEN_TIMEOUT_S: Final = 120.0
"""OpenRun unpacks the bundle, starts workers and imports the workflow."""

CALL_TIMEOUT_S: Final = 20.0
MAX_SPECS: Final = 512
"""Samples per StartSamples call; each carries its query."""


class RolloutLostError(Exception):
    """The dispatcher does not know the run: it was started anew."""


class RolloutEffects:
    """Executes effects on the dispatcher.

    Args:
        channel: To the dispatcher.
        context: The run.
        patience_s: How long it is waited for.
    """

    def __init__(self, channel: Channel, context: RunContext, *, patience_s: float) -> None:
        self._stub: Any = RolloutServiceStub(channel)
        self._context = context
        self._patience_s = patience_s
        self.address = channel.address
        self.incarnation = ""

    async def open(self, effect: OpenRollout) -> None:
        """Open the run there."""
        context = self._context
        request = pb.OpenRunRequest(
            request_id=new_request_id(),
            run_id=context.run_id,
            term=context.term,
            shards=context.shards,
        )
        response = await self._call(
            lambda: self._stub.OpenRun(request, timeout=OPEN_TIMEOUT_S), effect.waits
        )
        self.incarnation = response.incarnation

    async def start_samples(self, effect: StartSamples) -> None:
        """Hand samples over; those that it knows already it leaves alone."""
        for samples in _chunks(effect.samples):
            request = pb.StartSamplesRequest(
                request_id=new_request_id(),
                run_id=self._context.run_id,
                term=self._context.term,
                samples=[self._spec(sample_id) for sample_id in samples],
            )
            start = partial(self._stub.StartSamples, request, timeout=CALL_TIMEOUT_S)
            await self._call_open(start, effect.waits)

    async def cancel_samples(self, effect: CancelSamples) -> None:
        """Cut samples; a dispatcher that was started anew has none of them."""
        request = pb.CancelSamplesRequest(
            request_id=new_request_id(),
            run_id=self._context.run_id,
            term=self._context.term,
            sample_ids=[str(sample_id) for sample_id in effect.samples],
        )
        try:
            await self._call(
                lambda: self._stub.CancelSamples(request, timeout=CALL_TIMEOUT_S), effect.waits
            )
        except NotFoundError:
            return

    async def prepare_weights(self, effect: PrepareWeights) -> None:
        """Announce weights that a policy's update made."""
        context = self._context
        state = context.states[effect.policy]
        request = pb.PrepareWeightsRequest(
            request_id=new_request_id(),
            run_id=context.run_id,
            term=context.term,
            version=effect.version,
            policies={effect.policy: policy_manifest(state)},
        )
        await self._call(
            lambda: self._stub.PrepareWeights(request, timeout=CALL_TIMEOUT_S), effect.waits
        )

    async def activate(self, effect: ActivateVersion) -> None:
        """Tell which version is committed."""
        context = self._context
        assert context.manifest is not None, "a version is activated after its commit"
        request = pb.ActivateVersionRequest(
            request_id=new_request_id(),
            run_id=context.run_id,
            term=context.term,
            manifest=context.manifest,
        )
        await self._call_open(
            lambda: self._stub.ActivateVersion(request, timeout=CALL_TIMEOUT_S), effect.waits
        )

    async def close(self) -> None:
        """End workers and instances of the run."""
        request = pb.CloseRunRequest(
            request_id=new_request_id(), run_id=self._context.run_id, term=self._context.term
        )
        await self._stub.CloseRun(request, timeout=CALL_TIMEOUT_S)

    def watch(self, *, interval_ms: int) -> Any:  # noqa: ANN401 - a stream call
        """Open the stream of states."""
        request = pb.WatchStatusRequest(run_id=self._context.run_id, interval_ms=interval_ms)
        return self._stub.WatchStatus(request)

    async def _call(self, call: Callable[[], Awaitable[Any]], what: str) -> Any:  # noqa: ANN401
        return await patiently(call, patience_s=self._patience_s, what=f"{what} at {self.address}")

    async def _call_open(self, call: Callable[[], Awaitable[Any]], what: str) -> None:
        try:
            await self._call(call, what)
        except NotFoundError as error:
            raise RolloutLostError(error.message) from None

    def _spec(self, sample_id: SampleId) -> pb.SampleSpec:
        context = self._context
        group = sample_id.group
        return pb.SampleSpec(
            sample_id=str(sample_id),
            group_id=str(group),
            batch=group.batch.batch,
            batch_attempt=group.batch.attempt,
            ordinal=sample_id.ordinal,
            sample_attempt=sample_id.attempt,
            group_ordinal=group.ordinal,
            query_json=context.query_of(str(group)),
            version=group.batch.batch,
            seed=sample_seed(
                context.config.seed,
                batch=group.batch.batch,
                group=group.ordinal,
                sample=sample_id.ordinal,
            ),
        )


def _chunks(samples: tuple[SampleId, ...]) -> Iterator[tuple[SampleId, ...]]:
    for start in range(0, len(samples), MAX_SPECS):
        yield samples[start : start + MAX_SPECS]
