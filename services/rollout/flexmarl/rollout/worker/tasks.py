"""Tasks that know their place in a sample: what makes call ids equal in every repetition."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any, Protocol

from flexmarl.core.paths import PathNode


class TaskOwner(Protocol):
    """A sample, which ends its tasks when the workflow returns."""

    def adopt(self, task: SampleTask) -> None:
        """Takes note of a task that was created within the sample."""
        ...


class SampleTask(asyncio.Task[Any]):
    """A task of a sample.

    Attributes:
        node: Its place under the sample's root task.
        owner: The sample.
        random: Its random generator, made on first use.
        num_uuids: Ids that it drew.
    """

    node: PathNode
    owner: TaskOwner
    random: Random | None = None
    num_uuids: int = 0


def start_root(
    owner: TaskOwner, coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop
) -> SampleTask:
    """Starts the task that runs a sample's workflow."""
    return _start(owner, PathNode(), coroutine, loop, None)


def sample_task_factory(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any],
    *,
    context: Any = None,  # noqa: ANN401 - a contextvars.Context, handed through
) -> asyncio.Task[Any]:
    """The worker's task factory: a child of a sample's task gets its ordinal at creation."""
    parent = asyncio.current_task(loop)
    if isinstance(parent, SampleTask):
        return _start(parent.owner, parent.node.child(), coroutine, loop, context)
    return asyncio.Task(coroutine, loop=loop, context=context)


def _start(
    owner: TaskOwner,
    node: PathNode,
    coroutine: Coroutine[Any, Any, Any],
    loop: asyncio.AbstractEventLoop,
    context: Any,  # noqa: ANN401
) -> SampleTask:
    task = SampleTask(coroutine, loop=loop, context=context)
    # The task takes its first step in a later turn of the loop: it will find these.
    task.node = node
    task.owner = owner
    owner.adopt(task)
    return task
