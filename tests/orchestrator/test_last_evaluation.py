"""The evaluation of the last version, which no commit carries, after a restart."""

from __future__ import annotations

from orchestrator.cluster import Processes, cluster, run_config
from orchestrator.standin_rollout import StandInRollout, failing_sample, good_sample, sample_of

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.core.ids import BatchId, GroupId, SampleId, is_evaluation
from flexmarl.orchestrator.last_evaluation import stored_evaluation

LAST = 2


async def test_a_later_orchestrator_tells_the_same_numbers(processes: Processes) -> None:
    def verdict(spec):
        """One sample of the last evaluation fails, one is begun anew."""
        first = SampleId.parse(spec.sample_id).group.ordinal == 0
        if is_evaluation(spec.group_id) and spec.batch == LAST and first:
            if spec.ordinal == 0:
                return failing_sample(spec, "WORKFLOW_RAISED", "it raised")
            if spec.sample_attempt == 0:
                return sample_of(spec, common.SAMPLE_STATUS_SUPERSEDED)
        return good_sample(spec)

    evaluation = {"every": 1, "fraction": 0.3, "samples": 2}
    async with cluster(processes, rollout=StandInRollout(verdict)) as run:
        await run.submit(run_config(versions=LAST, evaluation=evaluation))
        assert (await run.follow()).status == common.RUN_STATUS_FINISHED
        told = dict(run.reports[LAST].batch.metrics)
        assert told["eval/num_failed"] == 1
        assert {"eval/greedy/team_reward", "eval/sampled/reward/sorter"} <= told.keys()
        assert all(name.startswith("eval/") for name in told)
        # What was evaluated before a commit is in its record.
        assert "eval/greedy/team_reward" in run.reports[0].batch.metrics

        run.orchestrator_process.kill()
        await run.orchestrator_process.start()
        await run.client.resume_run(run.run_id, home_shard=run.home)
        run.reports.clear()
        progress = await run.follow()
        assert (progress.status, progress.version) == (common.RUN_STATUS_FINISHED, LAST)
        assert sorted(run.reports) == [0, 1, LAST]
        assert dict(run.reports[LAST].batch.metrics) == told


class Samples:
    """A store that has samples alone."""

    def __init__(self, *samples: graph.Sample) -> None:
        self._samples = samples

    async def list_samples(self, *_: object, **__: object) -> list[graph.Sample]:
        return list(self._samples)

    async def list_vertices(self, *_: object, **__: object):
        for row in ():
            yield row


async def test_samples_from_before_a_return_to_this_version_do_not_count() -> None:
    def sample(attempt: int, reward: float) -> graph.Sample:
        group = GroupId(BatchId(LAST, attempt, evaluation=True), 0)
        sample = graph.Sample(sample_id=str(SampleId(group, 1)), status=common.SAMPLE_STATUS_DONE)
        sample.rewards.team = reward
        return sample

    config = run_config(versions=LAST, evaluation={"every": 1, "fraction": 0.3, "greedy": False})
    store = Samples(sample(0, 5.0), sample(1, 3.0))
    report = await stored_evaluation(store, "run", config, version=LAST)
    assert report is not None
    assert report.version == LAST
    assert dict(report.batch.metrics) == {"eval/sampled/team_reward": 3.0, "eval/num_failed": 0.0}
    assert await stored_evaluation(Samples(), "run", config, version=LAST) is None
