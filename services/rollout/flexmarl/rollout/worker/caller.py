"""The calls of one sample: checked, numbered, answered from what is stored or by the dispatcher."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

from flexmarl.api.common.v1alpha1.common_pb2 import Failure
from flexmarl.api.meg_store.v1alpha1.graph_pb2 import Vertex
from flexmarl.api.rollout.v1alpha1.engine_pb2 import SamplingParams
from flexmarl.api.rollout.v1alpha1.worker_pb2 import CallAnswer, WorkerSample
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.prompting import Agent
from flexmarl.rollout.worker import failures
from flexmarl.rollout.worker.calls import (
    agent_input_hash,
    sampling_params,
    to_json,
    tool_input_hash,
    tool_vertex,
    upstream_ids,
)
from flexmarl.rollout.worker.outbox import Outbox
from flexmarl.rollout.worker.user_code import UserCode
from flexmarl.rollout.workflow import CallError, Message, Output, Simulated

NOW: Final = "now"
"""Name of the tool vertices that record `ctx.now()`."""


class Caller:
    """Makes the calls of one sample.

    Attributes:
        spec: The sample.
        finished_calls: Finished calls of agents.
        finished_tools: Finished calls of tools.
        failure: Set when the run's configuration is at fault: the run cannot go on.

    Args:
        sample: The sample, with the vertices that are stored of it.
        on_diverged: Called when a repeated run asks for other work than is stored.
    """

    def __init__(
        self,
        sample: WorkerSample,
        *,
        user: UserCode,
        outbox: Outbox,
        executor: Executor,
        on_diverged: Callable[[], None],
    ) -> None:
        self.spec = sample.spec
        self.finished_calls: list[Output] = []
        self.finished_tools: list[Output] = []
        self.failure: Failure | None = None
        self._user = user
        self._outbox = outbox
        self._executor = executor
        self._on_diverged = on_diverged
        self._stored: dict[str, Vertex] = {v.meta.path: v for v in sample.stored}
        self._pending: dict[str, asyncio.Future[CallAnswer]] = {}
        self._diverged = False
        self._closed = False

    @property
    def diverged(self) -> bool:
        """Whether other work was asked for than is stored, or less."""
        return self._diverged or bool(self._stored)

    def answer(self, answer: CallAnswer) -> None:
        """Gives a call its answer; one that nobody waits for is dropped."""
        future = self._pending.pop(answer.vertex_id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def close(self) -> None:
        """Cuts the calls that the workflow no longer waits for, and refuses further ones."""
        self._closed = True
        if self._pending:
            self._outbox.event().cancelled_vertex_ids.extend(self._pending)
            self._pending.clear()

    def check_open(self, what: str) -> None:
        """Refuses work after the workflow returned."""
        if self._closed:
            raise RuntimeError(f"{what} after the workflow of sample {self.spec.sample_id} ended")

    def fatal(self, error: DomainError) -> CallError:
        """Notes that the run's configuration is at fault, whatever the workflow does next."""
        if self.failure is None:
            self.failure = failures.failure(error.reason, error.message, **error.metadata)
        return CallError(error.reason, error.message, error.metadata)

    def agent_call(
        self,
        name: str,
        *,
        path: str,
        after: Output | Iterable[Output] | None,
        messages: Iterable[Message] | None,
        simulated: Simulated | None,
        args: dict[str, Any],
    ) -> Coroutine[Any, Any, Output]:
        """Checks and renders a call; awaiting the result makes it."""
        agent = self._user.agents.get(name)
        if agent is None:
            known = ", ".join(sorted(self._user.agents))
            raise self.fatal(
                DomainError(
                    ErrorReason.UNKNOWN_AGENT,
                    f"ctx.call({name!r}): the run has no such agent; its agents: {known}",
                    {"agent": str(name), "known": known},
                )
            )
        inputs: dict[str, Any] = args
        if messages is not None:
            messages = [dict(message) for message in messages]
            inputs = {**args, "messages": messages}
        upstream = upstream_ids(after, inputs, sample_id=self.spec.sample_id)
        try:
            prompt = agent.prompt(args, messages)
        except DomainError as error:
            raise CallError(error.reason, error.message, error.metadata) from None
        return self._agent_call(agent, path, prompt, upstream, inputs, simulated)

    async def _agent_call(
        self,
        agent: Agent,
        path: str,
        prompt: list[int],
        upstream: list[str],
        inputs: dict[str, Any],
        simulated: Simulated | None,
    ) -> Output:
        self.check_open("a call was awaited")
        input_hash = agent_input_hash(agent, prompt, simulated, greedy=self.spec.greedy)
        vertex_id = f"{self.spec.sample_id}/{path}"
        stored = self._replayed(path, input_hash)
        if stored is not None:
            if stored.meta.HasField("failure"):
                raise _call_failed(stored.meta.failure)
            tokens = tuple(stored.payload.response_tokens)
            finish_reason = stored.meta.finish_reason
        else:
            sampling = sampling_params(
                agent,
                root_seed=self.spec.seed,
                path=path,
                simulated=simulated,
                greedy=self.spec.greedy,
            )
            answer = await self._ask(agent, path, vertex_id, input_hash, prompt, upstream, sampling)
            if answer.HasField("failure"):
                raise _call_failed(answer.failure)
            tokens, finish_reason = tuple(answer.tokens), answer.finish_reason
        text = agent.model.decode(tokens)
        output = Output(
            text, tokens, finish_reason, vertex_id, agent.name, path, value=text, inputs=inputs
        )
        self.finished_calls.append(output)
        return output

    async def _ask(
        self,
        agent: Agent,
        path: str,
        vertex_id: str,
        input_hash: bytes,
        prompt: list[int],
        upstream: list[str],
        sampling: SamplingParams,
    ) -> CallAnswer:
        """Sends a call; waits for its answer, which comes at latest at the agent's timeout_s."""
        future: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
        self._pending[vertex_id] = future
        self._outbox.event().calls.add(
            vertex_id=vertex_id,
            sample_id=self.spec.sample_id,
            path=path,
            agent=agent.name,
            policy=agent.config.policy,
            input_hash=input_hash,
            upstream_vertex_ids=upstream,
            prompt_tokens=prompt,
            sampling=sampling,
        )
        try:
            return await future
        except asyncio.CancelledError:
            if self._pending.pop(vertex_id, None) is not None:
                self._outbox.event().cancelled_vertex_ids.append(vertex_id)
            raise

    def tool_call(
        self,
        name: str,
        *,
        path: str,
        after: Output | Iterable[Output] | None,
        args: dict[str, Any],
    ) -> Coroutine[Any, Any, Output]:
        """Checks a call of a tool; awaiting the result makes it."""
        if name not in self._user.tools:
            known = ", ".join(sorted(self._user.tools)) or "none"
            raise self.fatal(
                DomainError(
                    ErrorReason.UNKNOWN_AGENT,
                    f"ctx.tool({name!r}): the run has no such tool; its tools: {known}",
                    {"tool": str(name), "known": known},
                )
            )
        upstream = upstream_ids(after, args, sample_id=self.spec.sample_id)
        tool_input = to_json(args, what=f"arguments of tool {name!r}")
        return self._tool_call(name, path, tool_input, upstream, args)

    async def _tool_call(
        self, name: str, path: str, tool_input: bytes, upstream: list[str], args: dict[str, Any]
    ) -> Output:
        self.check_open("a tool was awaited")
        input_hash = tool_input_hash(name, tool_input)
        stored = self._replayed(path, input_hash)
        if stored is not None:
            if stored.meta.HasField("failure"):
                raise _call_failed(stored.meta.failure)
            encoded = stored.payload.output
        else:
            record = partial(
                tool_vertex,
                self.spec,
                name=name,
                path=path,
                input_hash=input_hash,
                tool_input=tool_input,
                upstream=upstream,
                ready_unix_ns=time.time_ns(),
            )
            encoded = await self._run_tool(name, args, record)
        # Also the first time the workflow is given what a repeated run would be given.
        value = json.loads(encoded)
        text = value if isinstance(value, str) else encoded.decode()
        vertex_id = f"{self.spec.sample_id}/{path}"
        output = Output(text, (), "tool", vertex_id, name, path, value=value, inputs=args)
        self.finished_tools.append(output)
        return output

    async def _run_tool(self, name: str, args: dict[str, Any], record: Any) -> bytes:  # noqa: ANN401
        function = self._user.tools[name]
        what = f"tool {name!r}"
        try:
            if inspect.iscoroutinefunction(function):
                value = await function(**args)
            else:
                loop = asyncio.get_running_loop()
                value = await loop.run_in_executor(self._executor, partial(function, **args))
            encoded = to_json(value, what=f"value of {what}")
        except Exception as error:
            failure = failures.of_exception(
                error, reason=ErrorReason.TOOL_RAISED, what=what, folder=self._user.folder
            )
            self._store_tool(record(finished_unix_ns=time.time_ns(), failure=failure))
            raise _call_failed(failure) from error
        self._store_tool(record(finished_unix_ns=time.time_ns(), output=encoded))
        return encoded

    def recorded_now(self, path: str) -> float:
        """The time, as a vertex, so that a repeated run is given the same."""
        input_hash = tool_input_hash(NOW, b"")
        stored = self._replayed(path, input_hash)
        if stored is not None:
            return float(stored.payload.output)
        unix_ns = time.time_ns()
        now = unix_ns / 1e9
        self._store_tool(
            tool_vertex(
                self.spec,
                name=NOW,
                path=path,
                input_hash=input_hash,
                tool_input=b"{}",
                upstream=[],
                ready_unix_ns=unix_ns,
                finished_unix_ns=unix_ns,
                output=repr(now).encode(),
            )
        )
        return now

    def _store_tool(self, vertex: Vertex) -> None:
        if not self._closed:
            self._outbox.event().tools.append(vertex)

    def _replayed(self, path: str, input_hash: bytes) -> Vertex | None:
        """The stored vertex of a path; another input under it makes the sample start again."""
        stored = self._stored.pop(path, None)
        if stored is None or stored.meta.input_hash == input_hash:
            return stored
        self._diverged = True
        self._on_diverged()
        raise asyncio.CancelledError(f"replay of {self.spec.sample_id} diverged at {path}")


def _call_failed(failure: Failure) -> CallError:
    return CallError(failure.reason, failure.message, failure.metadata)
