"""Whom the end of a reward process is blamed on."""

from __future__ import annotations

from collections import Counter

from flexmarl.api.rollout.v1.worker_pb2 import RewardJob, RewardResult, WorkerSetup
from flexmarl.rollout.config import UserCodeConfig
from flexmarl.rollout.dispatcher.rewards import RewardPool
from flexmarl.runtime.config import LogConfig


def pool() -> RewardPool:
    """A pool whose processes are told of by hand."""
    return RewardPool(
        None, setup=WorkerSetup(), num_processes=1, timeout_s=1.0, log=LogConfig(),
        limits=UserCodeConfig(), reward="team:reward", estimator="group_norm", counters=Counter(),
        on_broken=lambda failure: None,
    )  # fmt: skip


async def test_a_job_behind_one_that_was_late_and_answered_at_last_is_not_blamed_for_it() -> None:
    """The late one's result was on the link when its process was ended for it."""
    rewards = pool()
    (slot,) = rewards._slots
    slot.ready = True
    told: list[RewardResult] = []
    for name in ("late", "next"):
        rewards.submit(RewardJob(sample_id=name), told.append)
    slot.timed_out = slot.sent[0]  # as it is killed
    rewards._scored(slot, RewardResult(sample_id="late"))
    rewards._bury(slot)
    assert [result.sample_id for result in told] == ["late"]
    assert not told[0].HasField("failure")
    slot.timed_out = None  # the next process
    slot.ready = True
    rewards._fill()
    for _ in range(2):  # and it has the tries that every job has
        assert [job.job.sample_id for job in slot.sent] == ["next"]
        rewards._bury(slot)
        slot.ready = True
        rewards._fill()
    assert "ended its process 2 times" in told[1].failure.message
