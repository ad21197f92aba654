"""A guesser that plays with a tool, and a scout that is asked for some games only.

The query is a secret digit from 0 to 7. The guesser has three guesses; after each, the tool
`compare` says whether the secret is smaller (`<`), larger (`>`) or found (`=`). The whole game is
one conversation, so its turns are trained as one row (`merge_turns`). In half of the games a scout
sees the secret first and may give the guesser one symbol on the way; in the others the workflow
says at once that no scout will be called, so the scout's policy need not wait for their end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexmarl.rollout.workflow import Context, FinishedSample, Message, Rewards

MAX_GUESSES = 3
TURN_COST = 0.2
"""What each guess after the first takes from the reward."""


async def team(ctx: Context, query: Mapping[str, Any]) -> bool:
    """Plays one game; says whether the secret was found."""
    opening: Any = "?"
    if query["scouted"]:
        opening = await ctx.call("scout", secret=query["secret"])
    ctx.last("scout")
    game: list[Message] = [{"role": "user", "content": opening}]
    for _ in range(MAX_GUESSES):
        guess = await ctx.call("guesser", messages=game)
        verdict = await ctx.tool("compare", secret=query["secret"], guess=guess, timeout_s=5.0)
        if verdict.value == "=":
            return True
        game += [{"role": "assistant", "content": guess}, {"role": "user", "content": verdict}]
    return False


def compare(secret: str, guess: str) -> str:
    """The tool: where the secret is, seen from a guess; `!` for what is no digit."""
    if guess not in "01234567" or len(guess) != 1:
        return "!"
    return "=" if secret == guess else "<" if secret < guess else ">"


def reward(sample: FinishedSample) -> Rewards:
    """All that were called share the game's reward; quicker games earn more."""
    guesses = len(sample.by_agent("guesser"))
    score = 1.0 - TURN_COST * (guesses - 1) if sample.output else 0.0
    called = {call.agent for call in sample.calls}
    return Rewards(
        team=score, agents=dict.fromkeys(called, score), metrics={"guesses": float(guesses)}
    )
