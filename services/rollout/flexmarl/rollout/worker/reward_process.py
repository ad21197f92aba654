"""A reward process: a child of the dispatcher that runs the user's reward function, one at a time.

It runs the user's advantage estimator, too, where the run has one of its own.

It waits for jobs on its link (freed by a frame; the closing of the link ends the process, I15). It
keeps no time: a function that never returns may hold the interpreter's lock (a regular expression
does), so the dispatcher ends the whole process when a job takes too long.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterable
from typing import Any, Final

from flexmarl.api.meg_store.v1.graph_pb2 import RewardSet
from flexmarl.api.rollout.v1.rollout_pb2 import RewardScope
from flexmarl.api.rollout.v1.worker_pb2 import (
    RewardCommand,
    RewardEvent,
    RewardJob,
    RewardResult,
    WorkerReady,
    WorkerSetup,
)
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.worker import failures, user_code
from flexmarl.rollout.worker.advantages import to_advantages
from flexmarl.rollout.worker.confine import confine
from flexmarl.rollout.worker.memory import is_beyond
from flexmarl.rollout.worker.reward_job import decode_job
from flexmarl.rollout.worker.rewards import to_reward_set
from flexmarl.rollout.worker.user_code import RewardCode
from flexmarl.runtime.child_link import ChildLink
from flexmarl.runtime.config import LogConfig
from flexmarl.runtime.logging import configure_logging

EXIT_MEMORY: Final = 88
"""Exit code of a process that ended itself, between two jobs, because it had grown too large."""


def run(args: dict[str, Any]) -> int:
    """Entry point of the forked child.

    Args:
        args: `log` and `limits`: the service's sections `log` and `user_code`.
    """
    configure_logging(LogConfig.model_validate(args["log"]), service="rollout-reward")
    confine(args["limits"])
    link = ChildLink.from_environment()
    scorer: Scorer | None = None
    while (frame := link.recv()) is not None:
        command = RewardCommand.FromString(frame)
        if command.HasField("setup"):
            ready, scorer = _set_up(command.setup)
            link.send(RewardEvent(ready=ready).SerializeToString())
        if scorer is None:
            continue
        for job in command.jobs:
            link.send(RewardEvent(results=[scorer.answer(job)]).SerializeToString())
            if is_beyond(scorer.memory_bytes):
                return EXIT_MEMORY
    return 0


def _set_up(setup: WorkerSetup) -> tuple[WorkerReady, Scorer | None]:
    try:
        user = user_code.load_reward(
            config_json=setup.config_json, workflow_path=setup.workflow_path
        )
    except DomainError as error:
        failure = failures.failure(error.reason, error.message, **error.metadata)
        return WorkerReady(failure=failure), None
    return WorkerReady(), Scorer(user)


class Scorer:
    """Runs the reward function of one run, and its advantage estimator.

    Attributes:
        memory_bytes: Most resident memory of the process between two jobs.
    """

    def __init__(self, user: RewardCode) -> None:
        workflow = user.config.workflow
        self.memory_bytes = workflow.worker_memory_mib << 20
        self._user = user
        self._what = f"reward {workflow.reward}"
        self._what_estimator = f"estimator {user.config.advantage.estimator}"

    def answer(self, job: RewardJob) -> RewardResult:
        """What user code makes of a finished sample, or of a group; never raises for what it does.

        A job with scopes asks the estimator, any other one the reward function.
        """
        result = RewardResult(sample_id=job.sample_id)
        what, reason = self._what, ErrorReason.REWARD_RAISED
        if job.scopes:
            what, reason = self._what_estimator, ErrorReason.ADVANTAGE_RAISED
        try:
            if job.scopes:
                result.advantages.extend(self._estimate(job.scopes))
            else:
                result.rewards.CopyFrom(self._score(job.job_json))
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            failure = failures.of_exception(
                error, reason=reason, what=what, folder=self._user.folder
            )
            result.failure.CopyFrom(failure)
        sys.stdout.flush()
        return result

    def _score(self, job_json: bytes) -> RewardSet:
        sample = decode_job(job_json)
        returned = _settled(self._user.reward(sample))
        return to_reward_set(
            returned, sample=sample, agents=self._user.config.agents.keys(), what=self._what
        )

    def _estimate(self, scopes: Iterable[RewardScope]) -> list[RewardScope]:
        estimator = self._user.estimator
        assert estimator is not None, "only a run's own estimator is asked"
        return [
            RewardScope(
                values=to_advantages(
                    _settled(estimator(list(scope.values))),
                    count=len(scope.values),
                    what=self._what_estimator,
                )
            )
            for scope in scopes
        ]


def _settled(returned: Any) -> Any:  # noqa: ANN401 - whatever the user's function returned
    """The value, of an async function, too."""
    return asyncio.run(_wait(returned)) if inspect.isawaitable(returned) else returned


async def _wait(awaitable: Any) -> Any:  # noqa: ANN401 - whatever the user's function returned
    return await awaitable
