"""What users write workflows, tools and rewards against.

    async def team(ctx: Context, query: dict) -> object:
        halves = await ctx.call("splitter", digits=query["digits"])
        left, right = await ctx.all(
            ctx.call("sorter", digits=halves.text[:2], after=halves),
            ctx.call("sorter", digits=halves.text[2:], after=halves),
        )
        return await ctx.call("merger", left=left, right=right)

    def reward(sample: FinishedSample) -> Rewards: ...

A workflow runs again after a crash and is given the stored answers, so it must make the same calls
with the same inputs: take time, random numbers and ids from `ctx`, not from the modules.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from random import Random
from typing import Any, Final, Protocol, TypeVar

__all__ = ["CallError", "Context", "FinishedSample", "Message", "Output", "Rewards", "Simulated"]

T = TypeVar("T")
_UINT32: Final = 2**32

Message = Mapping[str, Any]
"""A chat message: {"role": ..., "content": ...}; the content may be an `Output`."""


class CallError(Exception):
    """A call that will not be answered; a workflow may catch it, or else its sample fails.

    Attributes:
        reason: Reason from the error catalogue.
        message: One line that names the agent or tool.
        metadata: Names and values that the message speaks of.
    """

    def __init__(
        self, reason: str, message: str, metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Output:
    """What a call returned. Passed on to another call, it becomes an edge of the graph.

    It reads as its text in templates, messages and f-strings; text cut out of it is plain text, so
    say `after=output` where only a part is passed on. Two outputs are equal only if they are one.

    Attributes:
        text: Text of the response, special tokens left out; of a tool, its value (as JSON unless
            it is text).
        tokens: Sampled token ids, the end token included where it was sampled.
        finish_reason: "stop", "length" or "abort"; "tool" for tools.
        vertex_id: Id of the vertex in the graph.
        agent: Agent, or name of the tool.
        path: Path of the call: the same in each sample that made it.
        value: What a tool returned; the text of an agent.
        inputs: Arguments of the call as given.
        finished_unix_ns: When it finished, Unix nanoseconds.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    vertex_id: str
    agent: str
    path: str
    value: Any
    inputs: Mapping[str, Any] = field(default_factory=dict)
    finished_unix_ns: int = 0

    def __str__(self) -> str:
        return self.text

    def __format__(self, spec: str) -> str:
        return format(self.text, spec)

    def __repr__(self) -> str:
        return f"Output({self.agent} {self.path}: {self.text!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a simulated engine makes of one call; every other engine takes no notice of it.

    Attributes:
        output_tokens: Length of the response, cut at the agent's max_tokens; 0: max_tokens.
        tool_s: Emulated seconds that a tool holds the engine's slot before the first token.

    Raises:
        TypeError: The tokens are no whole number.
        ValueError: One of them is negative, or more than a call can say (2^32 tokens or ms).
    """

    output_tokens: int = 0
    tool_s: float = 0.0

    def __post_init__(self) -> None:
        # Checked here: a call is filled where it is sent, so nothing in it may be refused then.
        if not 0 <= index(self.output_tokens) < _UINT32 or not 0 <= self.tool_s * 1e3 < _UINT32 - 1:
            raise ValueError(f"{self}: neither may be negative, or beyond 2^32 tokens or ms")


class Context(Protocol):
    """What a workflow is given beside its query."""

    def call(
        self,
        agent: str,
        *,
        after: Output | Iterable[Output] | None = None,
        key: str | None = None,
        messages: Iterable[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        simulated: Simulated | None = None,
        **template_args: Any,  # noqa: ANN401 - whatever the user's template takes
    ) -> Coroutine[Any, Any, Output]:
        """Calls an agent; await it, join it with others, or make a task of it.

        Args:
            agent: Name from the run's config.
            after: Outputs that this call needs beyond those among its arguments.
            key: Names the call where the number of earlier calls may vary; replaces its number.
            messages: Chat messages, instead of the agent's template. An assistant's message whose
                content is an `Output` of the same model keeps the tokens that were sampled.
            tools: JSON schemas of tools, for the model's chat template.
            simulated: What an engine without a model makes of the call; for measurements.
            template_args: Values of the template's placeholders; Outputs among them, also within
                lists and dicts, become edges.

        Raises:
            CallError: UNKNOWN_AGENT, PROMPT_TOO_LONG, ROW_TOO_LARGE, or all attempts failed.
            TypeError: Placeholders and arguments do not match.
            RuntimeError: `last` was said for the agent.
        """
        ...

    def tool(
        self,
        name: str,
        *,
        after: Output | Iterable[Output] | None = None,
        key: str | None = None,
        once: bool = False,
        timeout_s: float | None = None,
        **args: Any,  # noqa: ANN401 - whatever the user's tool takes
    ) -> Coroutine[Any, Any, Output]:
        """Calls a tool of the run's config; its arguments and its value must be JSON values.

        A function that is not async runs in a thread, beside other samples.

        Args:
            name: Name from the run's config.
            after: Outputs that this call needs beyond those among its arguments.
            key: Names the call where the number of earlier calls may vary; replaces its number.
            once: Do not call it again after a crash. Without this a tool is called at least once;
                with it the intent is stored first, and a sample that crashed between intent and
                result fails.
            timeout_s: Longest run of the tool; None leaves only the sample's own limit.
            args: Arguments of the tool; Outputs among them become edges.

        Raises:
            CallError: TOOL_RAISED, or DEADLINE_EXCEEDED after `timeout_s`.
        """
        ...

    def all(self, *calls: Awaitable[T]) -> Awaitable[list[T]]:
        """Waits for all; results in the order given. The first failure cancels the others."""
        ...

    def any(self, *calls: Awaitable[T]) -> Awaitable[T]:
        """Waits for the first that succeeds and cancels the others.

        Raises:
            CallError: None succeeded; the failure of the first call given.
        """
        ...

    def each(self, *calls: Awaitable[T]) -> AsyncIterator[T]:
        """Results as they come: `async for result in ctx.each(...)`."""
        ...

    def gather(self, *calls: Awaitable[T]) -> Awaitable[list[T]]:
        """`all` under the name that asyncio has for it; `asyncio.gather` works as well."""
        ...

    def last(self, *agents: str) -> None:
        """Says that the sample will not call these agents again.

        A policy that no open sample can reach any more is updated while others still sample.
        Calls that were made before may still be under way; a later one is an error.
        """
        ...

    def now(self) -> float:
        """Seconds since the epoch, recorded: a repeated run sees the same time."""
        ...

    @property
    def random(self) -> Random:
        """The task's random generator, the same draws in a repeated run."""
        ...

    def uuid(self) -> uuid.UUID:
        """A random id, the same in a repeated run."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """What a reward function is given.

    Attributes:
        query: The query.
        output: What the workflow returned.
        calls: Finished calls of agents in the order of their paths.
        tools: Finished calls of tools in the order of their paths.
    """

    query: Mapping[str, Any]
    output: Any
    calls: tuple[Output, ...]
    tools: tuple[Output, ...] = ()

    def by_agent(self, agent: str) -> list[Output]:
        """Finished calls of one agent in the order of their paths."""
        return [call for call in self.calls if call.agent == agent]

    def one(self, agent: str) -> Output:
        """The only finished call of an agent.

        Raises:
            LookupError: There is none, or more than one.
        """
        found = self.by_agent(agent)
        if len(found) != 1:
            raise LookupError(f"agent {agent!r} has {len(found)} finished calls, not one")
        return found[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """What a reward function may return; a number is the team's, a dict is per agent.

    Attributes:
        team: Reward of the whole team.
        agents: Reward per agent, by name.
        vertices: Reward per call, by `Output` or vertex id.
        metrics: Further numbers to average per batch and show, by name.
    """

    team: float | None = None
    agents: Mapping[str, float] = field(default_factory=dict)
    vertices: Mapping[Output | str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
