"""What a sample and its dispatcher say to each other: calls and rows out, answers in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.meg_store.v1.graph_pb2 import Vertex
from flexmarl.api.rollout.v1.worker_pb2 import AgentCall, CallAnswer, WorkerSample
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.worker import failures
from flexmarl.rollout.worker.outbox import Outbox
from flexmarl.rollout.worker.replay import Replay
from flexmarl.rollout.workflow import CallError

MAX_OPEN: Final = 4096
"""Most questions of one sample at once: a workflow that asks without end would fill its service."""


class Exchange:
    """The open questions of one sample.

    Attributes:
        spec: The sample.
        replay: What is stored of it.
        failure: Set when the sample must fail, whatever its workflow makes of it.

    Args:
        sample: The sample, with the vertices that are stored of it.
        stop: Ends the sample: a repeated run asks for other work than is stored, or a run for
            more at once than a service can hold.
    """

    def __init__(self, sample: WorkerSample, *, outbox: Outbox, stop: Callable[[], None]) -> None:
        self.spec = sample.spec
        self.replay = Replay(sample.stored, on_diverged=stop)
        self.failure: Failure | None = None
        self._outbox = outbox
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._pending: dict[str, asyncio.Future[CallAnswer]] = {}
        self._calls: set[str] = set()
        self._num_preparing = 0
        self._closed = False

    def vertex_id(self, path: str) -> str:
        """Id of the vertex of a call."""
        return f"{self.spec.sample_id}/{path}"

    def check_open(self, what: str) -> None:
        """Refuses work after the workflow returned."""
        if self._closed:
            raise RuntimeError(f"{what} after the workflow of sample {self.spec.sample_id} ended")

    def fail_sample(self, error: DomainError) -> CallError:
        """Notes that the sample must fail, whatever the workflow does next."""
        if self.failure is None:
            self.failure = failures.failure(error.reason, error.message, **error.metadata)
        return CallError(error.reason, error.message, error.metadata)

    def answer(self, answer: CallAnswer) -> None:
        """Gives whoever asked its answer; one that nobody waits for is dropped."""
        future = self._pending.pop(answer.vertex_id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def new_call(self, path: str) -> AgentCall:
        """A call among what is sent next: to be filled at once, then `answer_to` awaited."""
        self._check_room()
        vertex_id = self.vertex_id(path)
        call = self._outbox.event().calls.add()
        call.vertex_id = vertex_id
        call.sample_id = self.spec.sample_id
        call.path = path
        self._calls.add(vertex_id)
        return call

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A call that waits for something else before it is made counts as one in progress."""
        self._check_room()
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1
        self.check_open("a call was made")

    async def answer_to(self, vertex_id: str) -> CallAnswer:
        """Waits for the answer of a call, which comes at latest at the agent's timeout_s."""
        future: asyncio.Future[CallAnswer] = self._loop.create_future()
        self._pending[vertex_id] = future
        try:
            return await future
        except asyncio.CancelledError:
            if vertex_id in self._calls and not self._closed:
                self._outbox.event().cancelled_vertex_ids.append(vertex_id)
            raise
        finally:
            self._calls.discard(vertex_id)
            self._pending.pop(vertex_id, None)

    async def store(self, vertex: Vertex) -> CallAnswer | None:
        """Has a tool's row stored; waits until it is durable, as long as the store needs.

        Returns:
            What was stored under the id before, if something was; None otherwise.
        """
        self.check_open("a tool was called")
        self._check_room()
        self._outbox.event().tools.append(vertex)
        answer = await self.answer_to(vertex.meta.vertex_id)
        return answer if answer.stored_before else None

    def record(self, vertex: Vertex) -> None:
        """Has a row stored that nobody waits for."""
        if not self._closed:
            self._outbox.event().tools.append(vertex)

    def leave(self, policies: Iterable[str]) -> None:
        """Says which policies will not be called again."""
        self._outbox.event().left.add(sample_id=self.spec.sample_id, policies=policies)

    def _check_room(self) -> None:
        if len(self._pending) + self._num_preparing >= MAX_OPEN:
            self._stop()
            raise self.fail_sample(
                DomainError(
                    ErrorReason.WORKFLOW_RAISED,
                    f"sample {self.spec.sample_id} has {MAX_OPEN} calls in progress: await some "
                    "before making more",
                )
            )

    def close(self) -> None:
        """Cuts the calls that the workflow no longer waits for, and refuses further ones."""
        self._closed = True
        if self._calls:
            self._outbox.event().cancelled_vertex_ids.extend(sorted(self._calls))
        self._pending.clear()
