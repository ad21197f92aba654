"""The workflow of an emulated workload: each sample makes the calls that its query lists.

A query holds the graphs of all its samples. Which sample takes which graph does not matter: they
take them in the order in which they start.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from flexmarl.rollout.workflow import Context, FinishedSample, Output, Simulated

_next: dict[str, itertools.count[int]] = {}
_barriers: dict[str, asyncio.Barrier] = {}


async def team(ctx: Context, query: Mapping[str, Any]) -> int:
    """Makes the calls of one graph, as its edges allow, or phase by phase."""
    key = query["key"]
    place = next(_next.setdefault(key, itertools.count()))
    calls = query["samples"][place]
    if query["phases"]:
        await _in_lock_step(ctx, query, calls)
    else:
        await _as_edges_allow(ctx, calls)
    return place


def reward(sample: FinishedSample) -> float:
    """Some reward: what is trained here is time."""
    return float(len(sample.calls) % 3)


async def _as_edges_allow(ctx: Context, calls: Sequence[Mapping[str, Any]]) -> None:
    loop = asyncio.get_running_loop()
    done: dict[int, asyncio.Future[Output]] = {call["id"]: loop.create_future() for call in calls}

    async def make(call: Mapping[str, Any]) -> None:
        after = [await done[before] for before in call["after"]]
        done[call["id"]].set_result(await _call(ctx, call, after))

    await ctx.gather(*(make(call) for call in calls))


async def _in_lock_step(
    ctx: Context, query: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]
) -> None:
    """All samples of the query make the calls of one level and agent, then those of the next."""
    key = query["key"]
    barrier = _barriers.setdefault(key, asyncio.Barrier(len(query["samples"])))
    done: dict[int, Output] = {}
    for phase in query["phases"]:
        await barrier.wait()
        if phase["switch_s"]:
            await asyncio.sleep(phase["switch_s"])
        own = [c for c in calls if c["level"] == phase["level"] and c["agent"] == phase["agent"]]
        answers = await ctx.gather(
            *(_call(ctx, call, [done[before] for before in call["after"]]) for call in own)
        )
        done.update((call["id"], answer) for call, answer in zip(own, answers, strict=True))


async def _call(ctx: Context, call: Mapping[str, Any], after: Sequence[Output]) -> Output:
    simulated = Simulated(output_tokens=call["output_tokens"], tool_s=call["tool_s"])
    return await ctx.call(
        call["agent"], text="0" * call["prompt_tokens"], after=after, simulated=simulated
    )
