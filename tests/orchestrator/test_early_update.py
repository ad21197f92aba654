"""A policy that no open sample can reach any more is updated while others still sample."""

from __future__ import annotations

from orchestrator.cluster import Processes, cluster, run_config
from orchestrator.standin_rollout import StandInRollout, sample_of

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.rollout.v1 import rollout_pb2 as pb


class Leaving(StandInRollout):
    """Samples of the first group call everybody; the others have left the splitter, and wait.

    Attributes:
        let_go: Whether the others end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.let_go = False
        self.waiting: list[tuple[str, pb.SampleSpec]] = []

    async def StartSamples(
        self, request: pb.StartSamplesRequest, context: object
    ) -> pb.StartSamplesResponse:
        if not self.let_go:
            held = [spec for spec in request.samples if spec.group_ordinal]
            self.waiting.extend((request.run_id, spec) for spec in held)
            rows = [sample_of(spec, common.SAMPLE_STATUS_OPEN) for spec in held]
            for row in rows:
                row.left_policies.append("splitter")
            assert self._store is not None
            await self._store.write_graph(request.run_id, term=request.term, samples=rows)
            self._known.update(spec.sample_id for spec in held)
        return await super().StartSamples(request, context)

    def release(self) -> None:
        """Lets the others end."""
        self.let_go = True
        for item in self.waiting:
            self._queue.put_nowait(item)

    def _calls(self, spec: pb.SampleSpec, sample: graph.Sample) -> list[graph.Vertex]:
        vertices = super()._calls(spec, sample)
        if spec.group_ordinal and spec.batch == 0:
            vertices = [vertex for vertex in vertices if vertex.meta.agent != "splitter"]
            del sample.rewards.agents["splitter"]
        sample.used_policies.extend(sorted({vertex.meta.policy for vertex in vertices}))
        return vertices


async def test_the_update_comes_before_the_batch_ends_and_no_row_is_taken_after(
    processes: Processes,
) -> None:
    rollout = Leaving()
    config = run_config(
        versions=2,
        batch={
            "groups": 4, "samples_per_group": 3, "on_sample_failure": "drop_sample",
            "replace_max": 0,
        },
    )  # fmt: skip
    async with cluster(processes, rollout=rollout) as run:
        await run.submit(config)
        await run.until(lambda _: (1, "splitter") in rollout.prepared)
        # Nine samples are open; the splitter has its update, and nobody else.
        assert run.trainer.applied == [("splitter", 0)]
        assert len(rollout.waiting) == 9
        samples = await run.store.list_samples(run.run_id, batch=0)
        assert sum(s.status == common.SAMPLE_STATUS_OPEN for s in samples) == 9
        rollout.release()
        progress = await run.follow()
        assert progress.status == common.RUN_STATUS_FINISHED
        manifests = await run.manifests()
        first = manifests[1].batch.policies
        assert {name: first[name].consumed for name in sorted(first) if name} == {
            "merger": 12, "sorter": 24, "splitter": 3,
        }  # fmt: skip
        assert all(not first[name].voided for name in first)
        assert len(run.trainer.applied) == 6
