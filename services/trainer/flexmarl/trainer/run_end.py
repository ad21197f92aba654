"""The end of a run's work here: awaited for a while, then ended; its leases are given back first.

What holds leases on the store's segments is an operation, and it gives them back however it ends.
So none may be left when the client of the store is closed, which is what they are given back by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Final

from flexmarl.runtime.logging import get_logger
from flexmarl.trainer.open_run import OpenRun

_GIVE_BACK_S: Final = 3.0
"""Longest wait for operations that were cancelled: time enough for a store that answers."""

_log = get_logger(__name__)


async def end_run(run: OpenRun, work: Collection[asyncio.Task[Any]], *, grace_s: float) -> None:
    """Ends what a closed run has under way, and closes its store.

    A rank cannot be stopped in the middle of a command, so a worker that is at work for the run
    after the grace is ended: what it would do later must not hold up who has its slot next.

    Args:
        run: The run; its claims are given up.
        work: Its operations that have not ended.
        grace_s: Longest wait for them to end by themselves.
    """
    late = await _unended(work, timeout_s=grace_s)
    if late:
        _log.warning("work_ended_with_its_run", run=run.run_id, work=_names(late))
        for ranks in [*run.ranks]:
            ranks.end_work()
        for task in late:
            task.cancel()
        left = await _unended(late, timeout_s=_GIVE_BACK_S)
        if left:
            _log.error("leases_left_to_the_store", run=run.run_id, work=_names(left))
    await run.store.close()


async def _unended(
    work: Collection[asyncio.Task[Any]], *, timeout_s: float
) -> set[asyncio.Task[Any]]:
    return (await asyncio.wait(work, timeout=timeout_s))[1] if work else set()


def _names(work: Collection[asyncio.Task[Any]]) -> list[str]:
    return sorted(task.get_name() for task in work)
