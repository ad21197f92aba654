"""One execution of the workflow on one query, from its start to its reward."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.rollout.v1.worker_pb2 import CallAnswer, SampleEnd, WorkerSample
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.paths import sort_key
from flexmarl.rollout.worker import failures
from flexmarl.rollout.worker.caller import AgentCaller
from flexmarl.rollout.worker.calls import to_shown_json
from flexmarl.rollout.worker.context import SampleContext
from flexmarl.rollout.worker.exchange import Exchange
from flexmarl.rollout.worker.outbox import Outbox
from flexmarl.rollout.worker.reward_job import encode_job
from flexmarl.rollout.worker.rewards import to_reward_set
from flexmarl.rollout.worker.tasks import SampleTask, start_root
from flexmarl.rollout.worker.tool_caller import ToolCaller
from flexmarl.rollout.worker.tool_threads import ToolThreads
from flexmarl.rollout.worker.user_code import UserCode
from flexmarl.rollout.workflow import FinishedSample, Output

STOP_GRACE_S: Final = 2.0
"""How long a workflow that is cut may take to clean up: it may also take no notice at all."""


class SampleRun:
    """Runs one sample and ends it with its reward.

    `execute` waits for the workflow (freed by its end, by sample_timeout_s, or by `cancel` and the
    time to clean up), then for an async reward function (freed by its end, by reward_timeout_s, or
    by `cancel` likewise). Each runs in a task of its own: what user code raises, be it a
    cancellation, is that task's outcome, and never the sample's.
    """

    def __init__(
        self,
        sample: WorkerSample,
        *,
        user: UserCode,
        outbox: Outbox,
        threads: ToolThreads,
    ) -> None:
        self.spec = sample.spec
        self._user = user
        self._exchange = Exchange(sample, outbox=outbox, stop=self._stop)
        self._agents = AgentCaller(
            user.agents,
            forms=user.forms,
            long_prompts=user.long_prompts,
            exchange=self._exchange,
        )
        self._tools = ToolCaller(user, exchange=self._exchange, threads=threads)
        self._query: Any = None
        self._tasks: set[SampleTask] = set()
        self._running: asyncio.Task[Any] | None = None
        self._stopped = asyncio.get_running_loop().create_future()
        self._cancelled = False

    def answer(self, answer: CallAnswer) -> None:
        """Gives a call its answer."""
        self._exchange.answer(answer)

    def cancel(self) -> None:
        """Cuts the sample."""
        self._cancelled = True
        self._stop()

    def adopt(self, task: SampleTask) -> None:
        """Takes note of a task of this sample, which ends with it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def execute(self) -> SampleEnd:
        """Runs the sample to its end; never raises for what user code does."""
        root = start_root(self, self._workflow(), asyncio.get_running_loop())
        if self._cancelled:
            root.cancel()
        try:
            await self._wait_for(root, self._user.config.workflow.sample_timeout_s)
        finally:
            self._close()
        end = SampleEnd(sample_id=self.spec.sample_id)
        if self._cancelled:
            end.status = common_pb2.SAMPLE_STATUS_CANCELLED
        elif self._is_diverged():
            end.status = common_pb2.SAMPLE_STATUS_SUPERSEDED
        elif (failure := self._failure_of(root)) is not None:
            end.status = common_pb2.SAMPLE_STATUS_FAILED
            end.failure.CopyFrom(failure)
        else:
            await self._finish(root.result(), end)
        return end

    async def _wait_for(self, task: asyncio.Task[Any], timeout_s: float) -> None:
        """Waits for user code, which may not have ended afterwards."""
        self._running = task
        await asyncio.wait(
            {task, self._stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self._stopped.done():
            await asyncio.wait({task}, timeout=STOP_GRACE_S)

    async def _workflow(self) -> Any:  # noqa: ANN401 - whatever the workflow returns
        self._query = json.loads(self.spec.query_json)
        context = SampleContext(
            self, exchange=self._exchange, agents=self._agents, tools=self._tools
        )
        return await self._user.workflow(context, self._query)

    def _stop(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)
        if self._running is not None:
            self._running.cancel()

    def _close(self) -> None:
        """Cuts the work that the workflow no longer waits for."""
        self._exchange.close()
        for task in tuple(self._tasks):
            task.cancel()

    def _is_diverged(self) -> bool:
        # A sample that must fail did not get to what it had asked for before.
        return self._exchange.failure is None and self._exchange.replay.diverged

    def _failure_of(self, root: SampleTask) -> Failure | None:
        workflow = self._user.config.workflow
        what = f"workflow {workflow.entry}"
        if self._exchange.failure is not None:
            return self._exchange.failure
        if not root.done():
            return failures.failure(
                ErrorReason.DEADLINE_EXCEEDED,
                f"{what} did not end within sample_timeout_s = {workflow.sample_timeout_s:g}",
                what=what,
            )
        if root.cancelled():
            message = f"{what} cancelled its own task"
            return failures.failure(ErrorReason.WORKFLOW_RAISED, message, what=what)
        error = root.exception()
        if error is None:
            return None
        return failures.of_exception(
            error, reason=ErrorReason.WORKFLOW_RAISED, what=what, folder=self._user.folder
        )

    async def _finish(self, output: Any, end: SampleEnd) -> None:  # noqa: ANN401
        section = self._user.config.workflow
        workflow = f"workflow {section.entry}"
        calls, tools = _by_path(self._agents.finished), _by_path(self._tools.finished)
        scored_here = inspect.iscoroutinefunction(self._user.reward)
        end.status = common_pb2.SAMPLE_STATUS_DONE
        with self._failing(end, ErrorReason.WORKFLOW_RAISED, workflow):
            end.output_json = to_shown_json(output, what="its output")
            if not scored_here:
                end.reward_job = encode_job(
                    self.spec.query_json, output, calls, tools, what=workflow
                )
        if scored_here and end.status == common_pb2.SAMPLE_STATUS_DONE:
            sample = FinishedSample(query=self._query, output=output, calls=calls, tools=tools)
            await self._score(sample, end)

    async def _score(self, sample: FinishedSample, end: SampleEnd) -> None:
        """Runs an async reward function, which shares the loop: it waits for others, mostly."""
        section = self._user.config.workflow
        what = f"reward {section.reward}"
        scoring = asyncio.get_running_loop().create_task(self._user.reward(sample))
        try:
            await self._wait_for(scoring, section.reward_timeout_s)
        finally:
            scoring.cancel()
        if self._cancelled:
            end.status = common_pb2.SAMPLE_STATUS_CANCELLED
            return
        with self._failing(end, ErrorReason.REWARD_RAISED, what):
            if not scoring.done():
                raise DomainError(
                    ErrorReason.REWARD_RAISED,
                    f"{what} did not end within reward_timeout_s = {section.reward_timeout_s:g}",
                    {"what": what},
                )
            agents = self._user.agents.keys()
            scores = to_reward_set(scoring.result(), sample=sample, agents=agents, what=what)
            end.rewards.CopyFrom(scores)

    @contextmanager
    def _failing(self, end: SampleEnd, reason: ErrorReason, what: str) -> Iterator[None]:
        """Fails the sample with whatever is raised; nothing is awaited, so it is the user's."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            end.status = common_pb2.SAMPLE_STATUS_FAILED
            failure = failures.of_exception(
                error, reason=reason, what=what, folder=self._user.folder
            )
            end.failure.CopyFrom(failure)


def _by_path(calls: list[Output]) -> tuple[Output, ...]:
    return tuple(sorted(calls, key=lambda call: sort_key(call.path)))
