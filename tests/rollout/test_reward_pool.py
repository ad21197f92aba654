"""Whom the end of a reward process is blamed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.rollout.v1.worker_pb2 import RewardJob, RewardResult, WorkerSetup
from flexmarl.rollout.config import UserCodeConfig
from flexmarl.rollout.dispatcher.rewards import RewardPool
from flexmarl.rollout.dispatcher.workers import MAX_STILLBORN
from flexmarl.runtime.config import LogConfig


def pool(
    *, estimator: str | None = None, on_broken: Callable[[Failure], None] = lambda failure: None
) -> RewardPool:
    """A pool whose processes are told of by hand."""
    return RewardPool(
        None, setup=WorkerSetup(), num_processes=1, timeout_s=1.0, log=LogConfig(),
        limits=UserCodeConfig(), reward="team:reward", estimator=estimator, counters=Counter(),
        on_broken=on_broken,
    )  # fmt: skip


class ChildThatEnded:
    """What is left of a process that ended as it imported."""

    exit_code = 4


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


@pytest.mark.parametrize(
    ("estimator", "named"),
    [
        (None, "importing the module of reward team:reward: it ended"),
        ("own:f", "importing the modules of reward team:reward and estimator own:f: it ended"),
    ],
)
async def test_who_cannot_be_imported_is_named(estimator: str | None, named: str) -> None:
    """An estimator of ours is in no module of the user's."""
    broken: list[Failure] = []
    rewards = pool(estimator=estimator, on_broken=broken.append)
    (slot,) = rewards._slots
    for _ in range(MAX_STILLBORN):
        assert not broken
        slot.child = ChildThatEnded()
        rewards._bury(slot)
    assert [failure.message.startswith(named) for failure in broken] == [True]
