"""The agents' calls of one sample: checked, rendered, answered from what is stored or anew."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.meg_store.v1.graph_pb2 import Vertex
from flexmarl.api.rollout.v1.worker_pb2 import CallAnswer
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.seeds import VertexSeeds
from flexmarl.rollout.prompting import Agent, Prompt
from flexmarl.rollout.worker.calls import CallForms, upstream_ids
from flexmarl.rollout.worker.chains import Chains
from flexmarl.rollout.worker.exchange import Exchange
from flexmarl.rollout.worker.leaving import Leaving
from flexmarl.rollout.worker.long_prompts import LongPrompts
from flexmarl.rollout.workflow import CallError, Message, Output, Simulated


class _Request(NamedTuple):
    """A call that is ready to be made."""

    agent: Agent
    path: str
    upstream: list[str]
    inputs: Mapping[str, Any]
    simulated: Simulated | None


class AgentCaller:
    """Makes the calls of agents of one sample.

    Attributes:
        finished: Finished calls.

    Args:
        agents: Agents of the run.
        forms: What their calls have in common; of all samples of the worker.
        long_prompts: Makes tokens of long prompts; for all samples of the worker.
        exchange: The sample's link to its dispatcher.
    """

    def __init__(
        self,
        agents: Mapping[str, Agent],
        *,
        forms: CallForms,
        long_prompts: LongPrompts,
        exchange: Exchange,
    ) -> None:
        self.finished: list[Output] = []
        self._agents = agents
        self._forms = forms
        self._long_prompts = long_prompts
        self._seeds = VertexSeeds(exchange.spec.seed)
        self._exchange = exchange
        self._leaving = Leaving({name: agent.config.policy for name, agent in agents.items()})
        self._chains = Chains()

    def last(self, names: Iterable[str]) -> None:
        """Notes that agents will not be called again."""
        for name in names:
            self._leave(self._leaving.last(self._agent(name, what="ctx.last").name))

    def call(
        self,
        name: str,
        *,
        path: str,
        after: Output | Iterable[Output] | None,
        messages: Iterable[Message] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        simulated: Simulated | None,
        args: dict[str, Any],
    ) -> Coroutine[Any, Any, Output]:
        """Checks and renders a call; awaiting the result makes it.

        A prompt becomes tokens here, too, unless it is long: then its sample alone waits for them.
        Calls whose answers are stored stay in one turn of the loop, whatever their length: joins of
        a repeated run count them in the order of before.
        """
        agent = self._agent(name, what="ctx.call")
        inputs: dict[str, Any] = args
        if messages is not None:
            messages = [dict(message) for message in messages]
            inputs = {**args, "messages": messages}
        what, sample_id = f"agent {name!r}", self._exchange.spec.sample_id

        def is_own(output: Output) -> bool:
            speaker = self._agents.get(output.agent)
            return speaker is not None and speaker.model is agent.model

        try:
            upstream = upstream_ids(after, inputs, sample_id=sample_id, what=what)
            said = agent.prompt(args, messages, tools=tools, is_own=is_own)
            wait = said.is_long and not self._exchange.replay.holds(path)
            prompt = said if wait else said.tokens()
        except DomainError as error:
            raise _refused(error) from None
        self._leaving.made(agent.name)
        return self._call(
            _Request(
                agent=agent,
                path=path,
                upstream=upstream,
                inputs=inputs,
                simulated=simulated,
            ),
            prompt,
        )

    async def _call(self, request: _Request, prompt: Prompt | list[int]) -> Output:
        agent = request.agent
        try:
            self._exchange.check_open("a call was awaited")
            if isinstance(prompt, Prompt):
                prompt = await self._tokens(prompt)
            chained = prompt if agent.config.merge_turns else None
            answer = self._ask(request, prompt)
            del prompt  # it is on its way, and thousands of samples may wait for their answers
            if answer is None:
                answer = await self._exchange.answer_to(self._exchange.vertex_id(request.path))
            if answer.HasField("failure"):
                raise call_failed(answer.failure)
            output = self._output(request, answer)
        finally:
            self._leave(self._leaving.ended(agent.name))
        self.finished.append(output)
        if chained is not None:
            self._chains.add(output, chained)
        return output

    async def _tokens(self, prompt: Prompt) -> list[int]:
        try:
            with self._exchange.preparing():
                return await self._long_prompts.tokens(prompt)
        except DomainError as error:
            raise _refused(error) from None

    def _ask(self, request: _Request, prompt: list[int]) -> CallAnswer | None:
        """Has a call made, unless its answer is stored; then it is returned."""
        agent, path = request.agent, request.path
        spec = self._exchange.spec
        form = self._forms.of(agent, greedy=spec.greedy)
        simulated = request.simulated
        input_hash = form.input_hash(prompt, simulated)
        stored = self._exchange.replay.take(path, input_hash)
        if stored is not None:
            return _answer_of(stored)
        call = self._exchange.new_call(path)
        call.agent = agent.name
        call.policy = agent.config.policy
        call.input_hash = input_hash
        call.upstream_vertex_ids.extend(request.upstream)
        call.prompt_tokens.extend(prompt)
        sampling = call.sampling
        sampling.CopyFrom(form.sampling)
        sampling.seed = self._seeds.of(path)
        if simulated is not None:
            sampling.simulated.output_tokens = simulated.output_tokens
            sampling.simulated.tool_ms = round(simulated.tool_s * 1e3)
        if agent.config.merge_turns:
            call.extends_vertex_id = self._chains.extended_by(agent.name, prompt)
        return None

    def _output(self, request: _Request, answer: CallAnswer) -> Output:
        agent, tokens = request.agent, tuple(answer.tokens)
        text = agent.model.decode(tokens)
        return Output(
            text,
            tokens,
            answer.finish_reason,
            self._exchange.vertex_id(request.path),
            agent.name,
            request.path,
            value=text,
            inputs=request.inputs,
            finished_unix_ns=answer.finished_unix_ns,
        )

    def _agent(self, name: str, *, what: str) -> Agent:
        agent = self._agents.get(name)
        if agent is not None:
            return agent
        known = ", ".join(sorted(self._agents))
        raise self._exchange.fail_sample(
            DomainError(
                ErrorReason.UNKNOWN_AGENT,
                f"{what}({name!r}): the run has no such agent; its agents: {known}",
                {"agent": str(name), "known": known},
            )
        )

    def _leave(self, policies: list[str]) -> None:
        if policies:
            self._exchange.leave(policies)


def _refused(error: DomainError) -> CallError:
    return CallError(error.reason, error.message, error.metadata)


def call_failed(failure: Failure) -> CallError:
    """What a workflow is told of a call that failed."""
    return CallError(failure.reason, failure.message, failure.metadata)


def _answer_of(stored: Vertex) -> CallAnswer:
    meta = stored.meta
    return CallAnswer(
        vertex_id=meta.vertex_id,
        tokens=stored.payload.response_tokens,
        finish_reason=meta.finish_reason,
        failure=meta.failure if meta.HasField("failure") else None,
        finished_unix_ns=meta.finished_unix_ns,
    )
