"""Runs from submit to end, against a real store, and over the death of each part."""

from __future__ import annotations

import asyncio
import json

import pytest
from orchestrator.books import CALLS_PER_SAMPLE, check_books
from orchestrator.cluster import AGENTS, Cluster, Processes, cluster, run_config
from orchestrator.standin_rollout import StandInRollout, failing_sample, good_sample
from orchestrator.standin_trainer import Bound, StandInTrainer, weights_of

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1.meg_store_pb2 import VERTEX_VIEW_FULL as FULL
from flexmarl.api.meg_store.v1.meg_store_pb2 import VertexFilter
from flexmarl.api.trainer.v1 import trainer_pb2 as pb
from flexmarl.client.errors import FlexMarlError, NotFoundError
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.run_config import RunConfig


class Held(StandInTrainer):
    """Computes nothing of a batch before it is let.

    Args:
        let: The first batch of which it computes nothing.
        pause_s: Seconds per micro-batch.
    """

    def __init__(self, *, let: int = 0, pause_s: float = 0.0) -> None:
        super().__init__(pause_s=pause_s)
        self.let = let

    async def _compute(self, request: pb.ComputeGradientsRequest, bound: Bound) -> pb.Operation:
        while request.version >= self.let:  # noqa: ASYNC110 - the test moves it
            await asyncio.sleep(0.01)
        return await super()._compute(request, bound)


async def test_a_run_trains_to_its_last_version(processes: Processes) -> None:
    async with cluster(processes) as run:
        await run.submit(run_config())
        progress = await run.follow()
        assert progress.status == common.RUN_STATUS_FINISHED
        assert (progress.version, progress.stage, list(progress.waits)) == (3, "done", [])
        await check_books(run)
        assert sorted(run.reports) == [0, 1, 2]
        assert run.rollout.activated == [0, 1, 2, 3]
        assert set(run.trainer.applied) == {(a, b) for a in AGENTS for b in range(3)}
        assert set(run.rollout.prepared) == {(b + 1, a) for a in AGENTS for b in range(3)}
        assert (await run.store.get_run(run.run_id)).status == common.RUN_STATUS_FINISHED
        await run.client.stop_run(run.run_id)  # answered once the services have let go of it
        assert run.rollout.opened == set()
        metrics = run.reports[1].batch.metrics
        assert 0.0 <= metrics["team_reward"] <= 3.0
        assert {f"reward/{agent}" for agent in AGENTS} <= set(metrics)
        assert 0.0 <= metrics["metric/exact"] <= 1.0
        assert metrics["num_samples"] == 12
        assert metrics["tokens/sampled"] == metrics["tokens/trained"] == 12 * 4 * 3
        assert metrics["train/sorter/loss"] == -0.5
        assert metrics["train/sorter/grad_norm"] == 0.75
        parts = [value for name, value in metrics.items() if name.startswith("step/")]
        assert sum(parts) == pytest.approx(metrics["step_s"])
        assert "utilisation/trainer" in metrics


async def test_the_orchestrator_is_killed_in_the_middle(processes: Processes) -> None:
    rollout, trainer = StandInRollout(pause_s=0.004), Held(let=1, pause_s=0.01)
    async with cluster(processes, rollout=rollout, trainer=trainer) as run:
        await run.submit(run_config(versions=4))
        for version in range(2):
            await run.until(lambda m, v=version: m is not None and m.version >= v)
            await asyncio.sleep(0.03 * version)
            run.orchestrator_process.kill()
            await run.orchestrator_process.start()
        trainer.let = 9
        progress = await follow_again(run)
        assert progress.status == common.RUN_STATUS_FINISHED
        await check_books(run, versions=4)
        assert sorted(run.reports) == [0, 1, 2, 3]


async def test_the_store_is_killed_in_the_middle(processes: Processes) -> None:
    rollout, trainer = StandInRollout(pause_s=0.004), Held(let=1, pause_s=0.01)
    async with cluster(processes, rollout=rollout, trainer=trainer) as run:
        await run.submit(run_config())
        await run.until(lambda m: m is not None and m.version >= 1)
        run.store_process.kill()
        await run.store_process.start()
        trainer.let = 9
        progress = await follow_again(run)
        assert progress.status == common.RUN_STATUS_FINISHED
        await check_books(run)


async def test_a_run_whose_memory_is_lost_returns_to_a_whole_version(processes: Processes) -> None:
    trainer = Held()
    async with cluster(processes, trainer=trainer) as run:
        await run.submit(run_config())
        await run.until(lambda m: m is not None and m.version == 0)
        find = run.store.find_whole_versions
        while not (await find(run.run_id)).HasField("newest_on_disk"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        trainer.let = 1
        await run.until(lambda m: m is not None and m.version == 1)
        lost = await run.store.get_manifest(run.run_id)
        run.orchestrator_process.kill()
        run.store_process.kill()
        run.store_process.lose_memory(lost.policies[agent].weights.key for agent in AGENTS)
        await run.store_process.start()
        await run.orchestrator_process.start()
        trainer.let = 9
        assert (await follow_again(run)).status == common.RUN_STATUS_FINISHED

        stored = await run.store.get_run(run.run_id)
        assert [(each.version, each.newest) for each in stored.returns] == [(0, 1)]
        manifests = await run.manifests()
        assert [(m.batch.batch, m.batch.batch_attempt) for m in manifests[1:]] == [
            (batch, 1) for batch in range(3)
        ]
        consumed = [name for m in manifests for name in m.batch.consumed_micro_batch_ids]
        weights = await weights_of(run.store, run.run_id, manifests[-1])
        for agent in AGENTS:
            assert weights[agent] == sum(name.endswith(f"-{agent}") for name in consumed)
            for manifest in manifests[1:]:
                assert manifest.batch.policies[agent].consumed == 12 * CALLS_PER_SAMPLE[agent]
        # What was drawn before is void, and the same seeds drew the same tokens again.
        drawn: dict[int, dict[str, list[int]]] = {0: {}, 1: {}}
        async for row in run.store.list_vertices(run.run_id, VertexFilter(batch=0), view=FULL):
            path = row.meta.vertex_id.partition("-")[2]
            drawn[row.meta.batch_attempt][path] = list(row.payload.response_tokens)
            is_void = row.meta.void_reason == common.VOID_REASON_ROLLED_BACK
            assert is_void == (row.meta.batch_attempt == 0)
        assert drawn[0] == drawn[1]


async def test_the_dispatcher_and_the_trainer_are_started_anew(processes: Processes) -> None:
    rollout, trainer = StandInRollout(pause_s=0.01), Held(let=1, pause_s=0.01)
    async with cluster(processes, rollout=rollout, trainer=trainer) as run:
        await run.submit(run_config(versions=4))
        await run.until(lambda m: m is not None and m.version >= 1)
        rollout.forget()
        trainer.let = 2
        await run.until(lambda m: m is not None and m.version >= 2)
        trainer.forget()
        trainer.let = 9
        progress = await run.follow()
        assert progress.status == common.RUN_STATUS_FINISHED
        await check_books(run, versions=4)
        assert len(rollout.terms) >= 2


async def test_a_dead_rank_costs_computing_never_rows(processes: Processes) -> None:
    trainer = StandInTrainer()
    async with cluster(processes, trainer=trainer) as run:
        trainer.fail_next = DomainError(ErrorReason.CHILD_DIED, "rank 0 ended with signal 9")
        await run.submit(run_config())
        progress = await run.follow()
        assert progress.status == common.RUN_STATUS_FINISHED
        await check_books(run)


async def test_one_slot_is_enough_for_three_policies(processes: Processes) -> None:
    trainer = StandInTrainer(num_slots=1)
    async with cluster(processes, trainer=trainer) as run:
        await run.submit(run_config(versions=2))
        assert (await run.follow()).status == common.RUN_STATUS_FINISHED
        await check_books(run, versions=2)
        assert set(trainer.suspended) == set(AGENTS)


async def test_failed_samples_are_refilled_and_void(processes: Processes) -> None:
    def verdict(spec):
        if spec.ordinal == 0 and spec.batch == 1:
            return failing_sample(spec, "WORKFLOW_RAISED", "ValueError: no")
        return good_sample(spec)

    async with cluster(processes, rollout=StandInRollout(verdict)) as run:
        await run.submit(run_config())
        assert (await run.follow()).status == common.RUN_STATUS_FINISHED
        batch = run.reports[1].batch
        assert (batch.num_groups_closed, batch.num_groups_dropped) == (4, 0)
        assert batch.metrics["num_samples"] == 12
        assert batch.metrics["num_failed"] == 4
        assert batch.policies["sorter"].voided["sample_failed"] == 8
        assert batch.policies["sorter"].consumed == 24


async def test_a_broken_workflow_fails_the_run_with_its_message(processes: Processes) -> None:
    def verdict(spec):
        return failing_sample(spec, "WORKFLOW_RAISED", "team.py: ValueError: no digits")

    async with cluster(processes, rollout=StandInRollout(verdict)) as run:
        await run.submit(run_config())
        progress = await run.follow()
        assert progress.status == common.RUN_STATUS_FAILED
        assert progress.failure.reason == "WORKFLOW_RAISED"
        assert "no digits" in progress.failure.message
        stored = await run.store.get_run(run.run_id)
        assert stored.failure.reason == "WORKFLOW_RAISED"


async def test_a_reward_function_that_gives_no_reward_fails_the_run(processes: Processes) -> None:
    def verdict(spec):
        sample = good_sample(spec)
        sample.rewards.ClearField("team")
        sample.rewards.agents.clear()
        return sample

    async with cluster(processes, rollout=StandInRollout(verdict)) as run:
        await run.submit(run_config())
        progress = await run.follow()
        assert progress.status == common.RUN_STATUS_FAILED
        assert progress.failure.reason == "REWARD_INVALID"
        assert "batch 0: none of its 48 rows has a reward" in progress.failure.message
        assert progress.version == 0


async def test_a_fatal_dispatcher_fails_the_run(processes: Processes) -> None:
    rollout = StandInRollout()
    rollout.fatal = common.Failure(reason="WORKFLOW_IMPORT_FAILED", message="no module 'team'")
    async with cluster(processes, rollout=rollout, trainer=Held()) as run:
        await run.submit(run_config())
        progress = await run.follow()
        assert progress.status == common.RUN_STATUS_FAILED
        assert progress.failure.message == "no module 'team'"


@pytest.mark.parametrize(
    ("queries", "words"),
    [
        ([], "it has no rows"),
        ([b'{"digits":1}'] * 3, "fewer than batch.groups = 4"),
        ([b'{"digits":1}', b"{"], "line 2 is not JSON"),
        ([b'{"number":1}'] * 9, "line 1 has no column 'digits'"),
    ],
)
async def test_a_bad_dataset_fails_the_run(processes: Processes, queries, words) -> None:
    async with cluster(processes) as run:
        await run.submit(run_config(), queries=queries)
        progress = await run.follow()
        assert progress.failure.reason == "DATASET_INVALID"
        assert words in progress.failure.message
        assert "data.jsonl" in progress.failure.message


async def test_stop_now_and_resume(processes: Processes) -> None:
    rollout, trainer = StandInRollout(pause_s=0.01), Held(let=1)
    async with cluster(processes, rollout=rollout, trainer=trainer) as run:
        await run.submit(run_config())
        await run.until(lambda m: m is not None and m.version >= 1)
        progress = await run.client.stop_run(run.run_id)
        assert progress.status == common.RUN_STATUS_STOPPED
        assert (await run.store.get_run(run.run_id)).status == common.RUN_STATUS_STOPPED
        with pytest.raises(FlexMarlError, match="resume"):
            await run.client.submit_run(run.run_id, home_shard=run.home)
        trainer.let = 9
        await run.client.resume_run(run.run_id, home_shard=run.home)
        assert (await run.follow()).status == common.RUN_STATUS_FINISHED
        await check_books(run)
        # A finished run can be asked for again: it is told, not driven.
        progress = await run.client.resume_run(run.run_id, home_shard=run.home)
        assert (progress.status, progress.version) == (common.RUN_STATUS_FINISHED, 3)


def changed(config: RunConfig, key: str, value: object) -> bytes:
    """The configuration with another setting, as it is sent."""
    settings = config.model_dump(mode="json")
    *path, last = key.split(".")
    section = settings
    for name in path:
        section = section[name]
    section[last] = value
    return json.dumps(settings).encode()


async def test_settings_of_a_resumed_run_are_taken_or_refused_by_name(
    processes: Processes,
) -> None:
    rollout, trainer = StandInRollout(pause_s=0.01), Held(let=1)
    async with cluster(processes, rollout=rollout, trainer=trainer) as run:
        await run.submit(run_config())
        await run.until(lambda m: m is not None and m.version >= 1)
        await run.client.stop_run(run.run_id)
        trainer.let = 9
        for key, value, words in (
            ("seed", 8, "7 -> 8: it is what makes the run this run"),
            ("batch.groups", 3, "the open batch was admitted with it"),
            ("dataset.path", "other.jsonl", "the run's cursor is a place in that dataset"),
            ("workflow.entry", "team:other", "stored samples are replayed by that workflow"),
            ("policies.sorter.model.path", "other", "its trained weights belong to that model"),
            ("agents.sorter.prompt", "{digits}!", "stored calls of the open batch were made"),
        ):
            text = changed(run_config(versions=5), key, value)
            with pytest.raises(FlexMarlError, match=rf"resume with {key}: .*{words}"):
                await run.client.resume_run(run.run_id, home_shard=run.home, config_json=text)
        longer = run_config(versions=5).model_dump_json().encode()
        await run.client.resume_run(run.run_id, home_shard=run.home, config_json=longer)
        progress = await run.follow()
        assert (progress.status, progress.version) == (common.RUN_STATUS_FINISHED, 5)
        # Every service reads the settings there.
        stored = RunConfig.model_validate_json((await run.store.get_run(run.run_id)).config_json)
        assert stored.versions == 5


async def test_stop_after_the_batch(processes: Processes) -> None:
    rollout, trainer = StandInRollout(pause_s=0.01), Held(let=1)
    async with cluster(processes, rollout=rollout, trainer=trainer) as run:
        await run.submit(run_config())
        # Not by the store: it has the commit before the orchestrator has begun the next batch.
        while (await run.client.get_run_status(run.run_id)).version < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await run.client.stop_run(run.run_id, finish_batch=True)
        trainer.let = 9
        progress = await run.follow()
        assert (progress.status, progress.version) == (common.RUN_STATUS_STOPPED, 2)
        for _ in range(2):
            await run.client.delete_run(run.run_id, home_shard=run.home)
        for call in (run.store.get_run, run.client.get_run_status):
            with pytest.raises(NotFoundError):
                await call(run.run_id)


async def test_a_second_orchestrator_takes_over(processes: Processes) -> None:
    rollout, trainer = StandInRollout(pause_s=0.01), Held(let=1)
    async with cluster(processes, rollout=rollout, trainer=trainer) as run:
        await run.submit(run_config())
        await run.until(lambda m: m is not None and m.version >= 1)
        await run.store.acquire_term(run.run_id, "orchestrator", holder="another one")
        with pytest.raises(FlexMarlError) as taken:
            await run.follow()
        assert taken.value.reason is ErrorReason.TERM_STALE
        # It stopped acting, and said nothing about the run's state.
        assert (await run.store.get_run(run.run_id)).status == common.RUN_STATUS_RUNNING


async def test_refusals(processes: Processes) -> None:
    async with cluster(processes, trainer=Held()) as run:
        with pytest.raises(NotFoundError):
            await run.client.get_run_status(run.run_id)
        with pytest.raises(NotFoundError, match="no run"):
            await run.client.submit_run("other", home_shard=run.home)
        with pytest.raises(FlexMarlError, match="home_shard"):
            await run.client.submit_run("other", home_shard=common.ShardAddress())
        await run.submit(run_config())
        progress = await run.client.submit_run(run.run_id, home_shard=run.home)  # again: answered
        with pytest.raises(FlexMarlError, match="stop it first"):
            await run.client.delete_run(run.run_id, home_shard=run.home)
        assert progress.status == common.RUN_STATUS_RUNNING
        with pytest.raises(FlexMarlError, match="several runs"):
            await run.client.submit_run("other", home_shard=run.home)
        status = await run.client.get_run_status(run.run_id)
        assert status.waits


async def test_sigterm_leaves_the_run_to_the_next_start(processes: Processes) -> None:
    rollout, trainer = StandInRollout(pause_s=0.01), Held(let=1)
    async with cluster(processes, rollout=rollout, trainer=trainer) as run:
        await run.submit(run_config())
        await run.until(lambda m: m is not None and m.version >= 1)
        assert await asyncio.to_thread(run.orchestrator_process.stop) == 0
        assert (await run.store.get_run(run.run_id)).status == common.RUN_STATUS_RUNNING
        trainer.let = 9
        await run.orchestrator_process.start()
        assert (await follow_again(run)).status == common.RUN_STATUS_FINISHED
        await check_books(run)


async def follow_again(run: Cluster):
    """Follow over a restart: the new process may not have taken the run up yet."""
    for _ in range(1000):
        try:
            return await run.follow()
        except FlexMarlError:
            await asyncio.sleep(0.05)
    raise AssertionError(run.orchestrator_process.log())
