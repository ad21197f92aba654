"""A team of two agents with a policy each, and a run of it that samples can be started in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout.dispatcher_harness import Cluster

TEAM = """
import asyncio
async def team(ctx, query):
    first = await ctx.call("plan", text=query.get("n", 0))
    left, right = await asyncio.gather(
        ctx.call("work", text="l", after=first), ctx.call("work", text="r", after=first)
    )
    return await ctx.call("plan", text=left)

def reward(sample):
    return {"plan": 1.0, "work": float(len(sample.calls))}
"""
AGENTS = {
    "plan": {"policy": "p", "prompt": "{text}>", "max_tokens": 4, "timeout_s": 20},
    "work": {"policy": "q", "prompt": "{text}>", "max_tokens": 4, "timeout_s": 20},
}


async def opened(cluster: Cluster, tmp_path: Path, **host: Any) -> None:
    """Has a run opened with one host, and version 0 active."""
    await cluster.create_run(tmp_path / "data.jsonl")
    cluster.host(**host)
    await cluster.open()
    await cluster.activate(0)
