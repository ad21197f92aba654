"""The `ctx` of a workflow: what `flexmarl.rollout.workflow.Context` promises."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Coroutine, Iterable
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from flexmarl.core.errors import not_built
from flexmarl.core.seeds import derive
from flexmarl.rollout.worker.tasks import SampleTask
from flexmarl.rollout.workflow import Message, Output, Simulated

if TYPE_CHECKING:
    from flexmarl.rollout.worker.caller import Caller
    from flexmarl.rollout.worker.tasks import TaskOwner

T = TypeVar("T")


class SampleContext:
    """One sample's context; the work is done by its `Caller`."""

    __slots__ = ("_caller", "_owner")

    def __init__(self, owner: TaskOwner, caller: Caller) -> None:
        self._owner = owner
        self._caller = caller

    def call(
        self,
        agent: str,
        *,
        after: Output | Iterable[Output] | None = None,
        key: str | None = None,
        messages: Iterable[Message] | None = None,
        simulated: Simulated | None = None,
        **template_args: Any,  # noqa: ANN401
    ) -> Coroutine[Any, Any, Output]:
        """See `Context.call`; the call is numbered, checked and rendered here and now."""
        path = self._task("ctx.call").node.call(key)
        return self._caller.agent_call(
            agent,
            path=path,
            after=after,
            messages=messages,
            simulated=simulated,
            args=template_args,
        )

    def tool(
        self,
        name: str,
        *,
        after: Output | Iterable[Output] | None = None,
        key: str | None = None,
        **args: Any,  # noqa: ANN401
    ) -> Coroutine[Any, Any, Output]:
        """See `Context.tool`."""
        path = self._task("ctx.tool").node.call(key)
        return self._caller.tool_call(name, path=path, after=after, args=args)

    def gather(self, *calls: Awaitable[T]) -> Awaitable[list[T]]:
        """See `Context.gather`."""
        return asyncio.gather(*calls)

    def last(self, agent: str) -> NoReturn:
        """Refused by name: closing an agent's subgraph early is not built."""
        raise self._caller.fatal(not_built(f"ctx.last({agent!r})"))

    def now(self) -> float:
        """See `Context.now`."""
        return self._caller.recorded_now(self._task("ctx.now").node.call())

    @property
    def random(self) -> Random:
        """See `Context.random`; per task, since tasks take turns in no fixed order."""
        task = self._task("ctx.random")
        if task.random is None:
            seed = derive(self._caller.spec.seed, "random", task.node.path)
            task.random = Random(seed)  # noqa: S311 - repeatable on purpose
        return task.random

    def uuid(self) -> uuid.UUID:
        """See `Context.uuid`."""
        task = self._task("ctx.uuid")
        task.num_uuids += 1
        names = ("uuid", task.node.path, task.num_uuids)
        high, low = (derive(self._caller.spec.seed, half, *names) for half in ("high", "low"))
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
        self._caller.check_open(what)
        return task
