"""A dispatcher that speaks the contract and writes real rows, without workers or engines."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from random import Random

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.rollout.v1 import rollout_pb2 as pb
from flexmarl.api.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer
from flexmarl.client.store import StoreClient
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import is_evaluation

CALLS = (("splitter", "0:0"), ("sorter", "0:1"), ("sorter", "0:2"), ("merger", "0:3"))
NUM_PROMPT = 4
NUM_RESPONSE = 3


class StandInRollout(RolloutServiceServicer):
    """Every sample makes four calls and ends; `verdict` may let it fail.

    Args:
        verdict: Status, rewards and failure of a sample, by its spec.
        pause_s: Seconds per sample.
    """

    def __init__(
        self,
        verdict: Callable[[pb.SampleSpec], graph.Sample] | None = None,
        *,
        pause_s: float = 0.0,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self.opened: set[str] = set()
        self.terms: list[int] = []
        self.started: list[pb.SampleSpec] = []
        self.cancelled: list[str] = []
        self.prepared: list[tuple[int, str]] = []
        self.activated: list[int] = []
        self.fatal: common.Failure | None = None
        self._known: set[str] = set()
        self._manifest = graph.Manifest()
        self._verdict = verdict or good_sample
        self._pause_s = pause_s
        self._store: StoreClient | None = None
        self._queue: asyncio.Queue[tuple[str, pb.SampleSpec]] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None

    async def OpenRun(self, request: pb.OpenRunRequest, _: object) -> pb.OpenRunResponse:
        if self._store is None:
            self._store = StoreClient.connect(request.shards[0].address)
            self._worker = asyncio.create_task(self._work())
        self.opened.add(request.run_id)
        self.terms.append(request.term)
        return pb.OpenRunResponse(incarnation=self.incarnation)

    async def CloseRun(self, request: pb.CloseRunRequest, _: object) -> pb.CloseRunResponse:
        self.opened.discard(request.run_id)
        return pb.CloseRunResponse()

    async def StartSamples(
        self, request: pb.StartSamplesRequest, _: object
    ) -> pb.StartSamplesResponse:
        self._require(request.run_id)
        for spec in request.samples:
            if spec.sample_id not in self._known:
                self._known.add(spec.sample_id)
                self.started.append(spec)
                self._queue.put_nowait((request.run_id, spec))
        return pb.StartSamplesResponse(incarnation=self.incarnation)

    async def CancelSamples(
        self, request: pb.CancelSamplesRequest, _: object
    ) -> pb.CancelSamplesResponse:
        self.cancelled.extend(request.sample_ids)
        return pb.CancelSamplesResponse()

    async def PrepareWeights(
        self, request: pb.PrepareWeightsRequest, _: object
    ) -> pb.PrepareWeightsResponse:
        self.prepared.extend((request.version, name) for name in request.policies)
        return pb.PrepareWeightsResponse()

    async def ActivateVersion(
        self, request: pb.ActivateVersionRequest, _: object
    ) -> pb.ActivateVersionResponse:
        self._require(request.run_id)
        self._manifest = request.manifest
        self.activated.append(request.manifest.version)
        return pb.ActivateVersionResponse()

    async def GetStatus(self, request: pb.GetStatusRequest, _: object) -> pb.GetStatusResponse:
        self._require(request.run_id)
        return pb.GetStatusResponse(status=self._status())

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, _: object
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        while True:
            self._require(request.run_id)
            yield pb.WatchStatusResponse(status=self._status())
            await asyncio.sleep((request.interval_ms or 500) / 1000)

    def forget(self) -> None:
        """Become another process: nothing is known, nothing in progress is written."""
        self.incarnation = uuid.uuid4().hex
        self.opened.clear()
        self._known.clear()
        while not self._queue.empty():
            self._queue.get_nowait()

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
        if self._store is not None:
            await self._store.close()

    async def _work(self) -> None:
        assert self._store is not None
        while True:
            items = [await self._queue.get()]
            while not self._queue.empty() and len(items) < 16:
                items.append(self._queue.get_nowait())
            await asyncio.sleep(self._pause_s * len(items))
            specs = [spec for _, spec in items if spec.sample_id in self._known]
            samples = [self._verdict(spec) for spec in specs]
            pairs = list(zip(specs, samples, strict=True))
            vertices = [vertex for pair in pairs for vertex in self._calls(*pair)]
            try:
                await self._store.write_graph(
                    items[0][0], term=self.terms[-1], samples=samples, vertices=vertices
                )
            except DomainError as error:
                # Another orchestrator comes: what was made is written under its term.
                assert error.reason is ErrorReason.TERM_STALE, error
                for item in items:
                    self._queue.put_nowait(item)
                await asyncio.sleep(0.01)

    def _calls(self, spec: pb.SampleSpec, sample: graph.Sample) -> list[graph.Vertex]:
        rng = Random(spec.seed)
        now = time.time_ns()
        vertices = []
        for agent, path in CALLS:
            vertex_id = f"{spec.sample_id}/{path}"
            tokens = [rng.randrange(6) for _ in range(NUM_RESPONSE)]
            meta = graph.VertexMeta(
                vertex_id=vertex_id,
                sample_id=spec.sample_id,
                group_id=spec.group_id,
                batch=spec.batch,
                batch_attempt=spec.batch_attempt,
                sample_attempt=spec.sample_attempt,
                attempt=1,
                path=path,
                agent=agent,
                policy=agent,
                kind=common.VERTEX_KIND_AGENT,
                status=common.VERTEX_STATUS_DONE,
                policy_version=spec.version,
                weights_hash=self._manifest.policies[agent].weights_hash,
                version_runs=[common.VersionRun(version=spec.version, num_tokens=NUM_RESPONSE)],
                num_prompt_tokens=NUM_PROMPT,
                num_response_tokens=NUM_RESPONSE,
                finish_reason="length",
                finished_unix_ns=now,
                trainable=not is_evaluation(spec.group_id),
            )
            payload = graph.VertexPayload(
                prompt_tokens=[0] * NUM_PROMPT,
                response_tokens=tokens,
                logprobs=[-1.0] * NUM_RESPONSE,
                temperature=1.0,
            )
            vertices.append(graph.Vertex(meta=meta, payload=payload))
        sample.num_vertices = len(vertices)
        return vertices

    def _status(self) -> pb.RolloutStatus:
        status = pb.RolloutStatus(
            incarnation=self.incarnation, ready=True, version=self._manifest.version
        )
        status.queues["sorter"].num_waiting = self._queue.qsize()
        status.instances.add(instance_id="sorter-0", policies=["sorter"], busy_fraction=0.5)
        if self.fatal is not None:
            status.fatal.CopyFrom(self.fatal)
        return status

    def _require(self, run_id: str) -> None:
        if run_id not in self.opened:
            raise DomainError(ErrorReason.RUN_NOT_FOUND, f"no run {run_id}")


def sample_of(spec: pb.SampleSpec, status: common.SampleStatus.ValueType) -> graph.Sample:
    """The end of a sample."""
    return graph.Sample(
        sample_id=spec.sample_id,
        group_id=spec.group_id,
        batch=spec.batch,
        batch_attempt=spec.batch_attempt,
        ordinal=spec.ordinal,
        sample_attempt=spec.sample_attempt,
        status=status,
    )


def good_sample(spec: pb.SampleSpec) -> graph.Sample:
    """A sample that succeeds, with a reward drawn from its seed."""
    sample = sample_of(spec, common.SAMPLE_STATUS_DONE)
    rng = Random(spec.seed)
    sample.rewards.team = float(rng.randrange(4))
    for agent in ("splitter", "sorter", "merger"):
        sample.rewards.agents[agent] = float(rng.randrange(4))
    sample.rewards.metrics["exact"] = float(rng.randrange(2))
    return sample


def failing_sample(spec: pb.SampleSpec, reason: str, message: str) -> graph.Sample:
    """A sample that fails."""
    sample = sample_of(spec, common.SAMPLE_STATUS_FAILED)
    sample.failure.reason = reason
    sample.failure.message = message
    return sample
