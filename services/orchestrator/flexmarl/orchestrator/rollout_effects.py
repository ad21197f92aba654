"""Effects on the Rollout dispatcher."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from flexmarl.api.rollout.v1 import rollout_pb2 as pb
from flexmarl.client.errors import NotFoundError
from flexmarl.client.rollout import RolloutClient
from flexmarl.core.ids import SampleId
from flexmarl.core.run_effects import (
    ActivateVersion,
    CancelSamples,
    ComputeAdvantages,
    OpenRollout,
    PrepareWeights,
    StartSamples,
)
from flexmarl.core.run_events import AdvantagesMade
from flexmarl.core.seeds import evaluation_seed, sample_seed
from flexmarl.orchestrator.calls import fenced, waiting
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.convert import policy_manifest
from flexmarl.runtime.message_batches import batches

MAX_SPECS: Final = 512
"""Samples per StartSamples call, or fewer: each carries its query, which may be a MiB."""


class RolloutLostError(Exception):
    """The dispatcher does not know the run: it was started anew."""


class RolloutEffects:
    """Executes effects on the dispatcher.

    Args:
        client: Of the dispatcher.
        context: The run.
    """

    def __init__(self, client: RolloutClient, context: RunContext) -> None:
        self._client = client
        self._context = context
        self.address = client.address
        self.incarnation = ""

    async def open(self, effect: OpenRollout) -> None:
        """Open the run there."""
        context = self._context
        with waiting(effect.waits), fenced():
            self.incarnation = await self._client.open_run(
                context.run_id, term=context.term, shards=context.shards
            )

    async def start_samples(self, effect: StartSamples) -> None:
        """Hand samples over; those that it knows already it leaves alone."""
        specs_of_all = map(self._spec, effect.samples)
        for specs in batches(specs_of_all, max_items=MAX_SPECS):
            with waiting(effect.waits), fenced(), _known_run():
                await self._client.start_samples(
                    self._context.run_id, specs, term=self._context.term
                )

    async def cancel_samples(self, effect: CancelSamples) -> None:
        """Cut samples; a dispatcher that was started anew has none of them."""
        sample_ids = [str(sample_id) for sample_id in effect.samples]
        with waiting(effect.waits), fenced(), suppress(NotFoundError):
            await self._client.cancel_samples(
                self._context.run_id, sample_ids, term=self._context.term
            )

    async def compute_advantages(self, effect: ComputeAdvantages) -> AdvantagesMade:
        """Ask the run's own estimator, at most as long as a sample may take."""
        context = self._context
        with waiting(effect.waits), fenced(), _known_run():
            scopes = await self._client.compute_advantages(
                context.run_id,
                effect.group_id,
                effect.scopes,
                term=context.term,
                timeout_s=context.config.workflow.sample_timeout_s,
            )
        return AdvantagesMade(tuple(tuple(values) for values in scopes))

    async def prepare_weights(self, effect: PrepareWeights) -> None:
        """Announce weights that a policy's update made."""
        context = self._context
        policies = {effect.policy: policy_manifest(context.states[effect.policy])}
        with waiting(effect.waits), fenced():
            await self._client.prepare_weights(
                context.run_id, effect.version, policies, term=context.term
            )

    async def activate(self, effect: ActivateVersion) -> None:
        """Tell which version is committed."""
        context = self._context
        assert context.manifest is not None, "a version is activated after its commit"
        with waiting(effect.waits), fenced(), _known_run():
            await self._client.activate_version(context.run_id, context.manifest, term=context.term)

    async def close(self) -> None:
        """End workers and instances of the run."""
        await self._client.close_run(self._context.run_id, term=self._context.term)

    def watch(self, *, interval_s: float) -> AsyncGenerator[pb.RolloutStatus, None]:
        """Its states."""
        return self._client.watch_status(self._context.run_id, interval_s=interval_s)

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
            seed=self._seed(sample_id),
            evaluation=group.batch.evaluation,
            greedy=group.batch.evaluation and sample_id.ordinal == 0,
        )

    def _seed(self, sample_id: SampleId) -> int:
        group, seed = sample_id.group, self._context.config.seed
        if group.batch.evaluation:
            return evaluation_seed(seed, query=group.ordinal, sample=sample_id.ordinal)
        return sample_seed(
            seed, batch=group.batch.batch, group=group.ordinal, sample=sample_id.ordinal
        )


@contextmanager
def _known_run() -> Iterator[None]:
    try:
        yield
    except NotFoundError as error:
        raise RolloutLostError(error.message) from None
