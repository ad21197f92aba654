"""The proof's team: a planner, two calls of a solver in parallel, a judge; some samples fail.

Nothing that is sampled depends on time: failures are drawn from `ctx.random`, so they are the same
in every run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from flexmarl.rollout.workflow import Context, FinishedSample, Rewards

FAILING = 0.06
"""Share of samples that fail after all of their calls."""

PAUSE_S = 1.0
"""Of samples without a judge, once those with one have ended: the cluster's time to see that."""

_judged: set[asyncio.Task[Any] | None] = set()
"""Samples with a judge that run in this worker."""


async def team(ctx: Context, query: Mapping[str, Any]) -> str:
    """The judge's answer."""
    digits = query["digits"]
    plan = await ctx.call("planner", digits=digits)
    left, right = await ctx.gather(
        ctx.call("solver", digits=digits[:2], after=plan),
        ctx.call("solver", digits=digits[2:], after=plan),
    )
    verdict = await ctx.call("judge", left=left, right=right)
    if ctx.random.random() < FAILING:
        raise RuntimeError("this sample was to fail")
    return verdict.text


async def apart(ctx: Context, query: Mapping[str, Any]) -> str:
    """Some queries have a judge, and he does not wait for the others: he can be updated early."""
    digits = query["digits"]
    if digits[0] in "02":
        task = asyncio.current_task()
        _judged.add(task)
        try:
            return await team(ctx, query)
        finally:
            _judged.discard(task)
    ctx.last("judge")
    plan = await ctx.call("planner", digits=digits)
    while _judged:  # noqa: ASYNC110 - no event says that it is empty
        await asyncio.sleep(0.02)
    await asyncio.sleep(PAUSE_S)
    halves = [ctx.call("solver", digits=half, after=plan) for half in (digits[:2], digits[2:])]
    return "".join(answer.text for answer in await ctx.gather(*halves))


def reward(sample: FinishedSample) -> Rewards:
    """How often each call wrote the first digit that it was shown, and the team the query's."""
    first = sample.query["digits"][0]
    return Rewards(
        team=share(sample.output, first),
        vertices={call: share(call.text, first) for call in sample.calls},
    )


def share(text: str, symbol: str) -> float:
    """Share of a symbol in a text."""
    return text.count(symbol) / max(len(text), 1)
