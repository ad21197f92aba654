"""A solver, a verifier and a refiner, one after the other, on a question about numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexmarl.rollout.workflow import Context


async def team(ctx: Context, query: Mapping[str, Any]) -> str:
    """Returns what the refiner wrote, having read the draft and the verdict on it."""
    question = query["question"]
    draft = await ctx.call("solver", question=question)
    verdict = await ctx.call("verifier", solution=draft)
    final = await ctx.call("refiner", question=question, solution=draft, verdict=verdict)
    return final.text
