"""The `ctx` of a workflow: what `flexmarl.rollout.workflow.Context` promises."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from flexmarl.core.seeds import derive
from flexmarl.rollout.worker import joins
from flexmarl.rollout.worker.tasks import SampleTask
from flexmarl.rollout.workflow import Message, Output, Simulated

if TYPE_CHECKING:
    from flexmarl.rollout.worker.caller import AgentCaller
    from flexmarl.rollout.worker.exchange import Exchange
    from flexmarl.rollout.worker.tasks import TaskOwner
    from flexmarl.rollout.worker.tool_caller import ToolCaller

T = TypeVar("T")


class SampleContext:
    """One sample's context; the work is done by its callers."""

    __slots__ = ("_agents", "_exchange", "_owner", "_tools")

    def __init__(
        self, owner: TaskOwner, *, exchange: Exchange, agents: AgentCaller, tools: ToolCaller
    ) -> None:
        self._owner = owner
        self._exchange = exchange
        self._agents = agents
        self._tools = tools

    def call(
        self,
        agent: str,
        *,
        after: Output | Iterable[Output] | None = None,
        key: str | None = None,
        messages: Iterable[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        simulated: Simulated | None = None,
        **template_args: Any,  # noqa: ANN401
    ) -> Coroutine[Any, Any, Output]:
        """See `Context.call`; the call is numbered, checked and rendered here and now."""
        if simulated is not None and not isinstance(simulated, Simulated):
            raise TypeError(f"simulated= takes a Simulated, not {type(simulated).__name__}")
        path = self._task("ctx.call").node.call(key)
        return self._agents.call(
            agent,
            path=path,
            after=after,
            messages=messages,
            tools=tools,
            simulated=simulated,
            args=template_args,
        )

    def tool(
        self,
        name: str,
        *,
        after: Output | Iterable[Output] | None = None,
        key: str | None = None,
        once: bool = False,
        timeout_s: float | None = None,
        **args: Any,  # noqa: ANN401
    ) -> Coroutine[Any, Any, Output]:
        """See `Context.tool`."""
        path = self._task("ctx.tool").node.call(key)
        return self._tools.call(
            name, path=path, after=after, once=once, timeout_s=timeout_s, args=args
        )

    def all(self, *calls: Awaitable[T]) -> Coroutine[Any, Any, list[T]]:
        """See `Context.all`."""
        self._task("ctx.all")
        return joins.all_of(joins.started(calls))

    def any(self, *calls: Awaitable[T]) -> Coroutine[Any, Any, T]:
        """See `Context.any`."""
        self._task("ctx.any")
        if not calls:
            raise ValueError("ctx.any() needs at least one call")
        return joins.any_of(joins.started(calls))

    def each(self, *calls: Awaitable[T]) -> joins.Each[T]:
        """See `Context.each`."""
        self._task("ctx.each")
        return joins.Each(joins.started(calls))

    def gather(self, *calls: Awaitable[T]) -> Coroutine[Any, Any, list[T]]:
        """See `Context.gather`."""
        return self.all(*calls)

    def last(self, *agents: str) -> None:
        """See `Context.last`."""
        self._task("ctx.last")
        self._agents.last(agents)

    def now(self) -> float:
        """See `Context.now`."""
        return self._tools.now(self._task("ctx.now").node.call())

    @property
    def random(self) -> Random:
        """See `Context.random`; per task, since tasks take turns in no fixed order."""
        task = self._task("ctx.random")
        if task.random is None:
            seed = derive(self._exchange.spec.seed, "random", task.node.path)
            task.random = Random(seed)  # noqa: S311 - repeatable on purpose
        return task.random

    def uuid(self) -> uuid.UUID:
        """See `Context.uuid`."""
        task = self._task("ctx.uuid")
        task.num_uuids += 1
        names = ("uuid", task.node.path, task.num_uuids)
        high, low = (derive(self._exchange.spec.seed, half, *names) for half in ("high", "low"))
        return uuid.UUID(int=(high << 64) | low, version=4)

    def _task(self, what: str) -> SampleTask:
        try:
            task = asyncio.current_task()
        except RuntimeError:
            task = None
        if not isinstance(task, SampleTask) or task.owner is not self._owner:
            raise RuntimeError(
                f"{what} was used outside of the tasks of its sample (in a thread, a callback, or "
                "another sample): its place there would not be the same in a repeated run"
            )
        self._exchange.check_open(what)
        return task
