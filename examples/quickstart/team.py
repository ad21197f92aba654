"""A team that learns to sort: a splitter, a sorter called twice in parallel, a merger.

The query is four digits, two low ones (0, 1) and two high ones (2, 3), in any order. The splitter
writes the low digits and then the high ones, each half is sorted by its own call of the sorter, and
the merger joins what the two really wrote. Every agent has a policy of its own, trained from random
weights by what it is told here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from flexmarl.rollout.workflow import Context, FinishedSample, Rewards

DIGITS = "0123"
END = "."
"""The end symbol: what stands after it is not part of an answer."""

LOCAL_SHARE = 0.8
"""Share of an agent's reward that its own answer earns; the team's answer earns the rest.

Of the team's answer, most is what the others did: noise, as long as they guess.
"""


async def team(ctx: Context, query: Mapping[str, Any]) -> str:
    """Sorts the query's digits; the result is what the merger wrote."""
    halves = await ctx.call("splitter", digits=query["digits"])
    low, high = pieces(halves.text)
    left, right = await ctx.gather(
        ctx.call("sorter", digits=low, after=halves),
        ctx.call("sorter", digits=high, after=halves),
    )
    merged = await ctx.call(
        "merger", left=digits_of(left.text), right=digits_of(right.text), after=[left, right]
    )
    return digits_of(merged.text)


def reward(sample: FinishedSample) -> Rewards:
    """Scores the team by the sorted query, and each call by what it was given."""
    digits = sample.query["digits"]
    team_reward = share(sample.output, sorted_digits(digits))
    return Rewards(
        team=team_reward,
        vertices={
            call: blend(local_reward(call.agent, call.inputs, call.text), team_reward)
            for call in sample.calls
        },
    )


def local_reward(agent: str, inputs: Mapping[str, Any], text: str) -> float:
    """How well one call did its own part, in [0, 1]."""
    if agent == "splitter":
        return splitting_reward(inputs["digits"], text)
    given = inputs["digits"] if agent == "sorter" else inputs["left"] + inputs["right"]
    return share(digits_of(text), sorted_digits(given))


def splitting_reward(digits: str, text: str) -> float:
    """Right digits in the right piece, and a little for writing digits at all."""
    low, high = pieces(text)
    right = overlap(low, [d for d in digits if d in "01"]) + overlap(
        high, [d for d in digits if d in "23"]
    )
    written = len(low) + len(high)
    return 0.75 * right / max(len(digits), written) + 0.25 * written / len(digits)


def blend(local: float, team_reward: float) -> float:
    """The reward of a call: its own part and the team's."""
    return LOCAL_SHARE * local + (1 - LOCAL_SHARE) * team_reward


def pieces(text: str) -> tuple[str, str]:
    """The low and the high piece in what the splitter wrote, digits only."""
    answer = text.split(END, 1)[0]
    return digits_of(answer[:2]), digits_of(answer[2:4])


def digits_of(text: str) -> str:
    """The digits before the end symbol."""
    return "".join(d for d in text.split(END, 1)[0] if d in DIGITS)


def sorted_digits(digits: str) -> str:
    """The digits in order."""
    return "".join(sorted(digits))


def share(answer: str, wanted: str) -> float:
    """Share of equal positions, over the longer of the two; 1 when both are empty."""
    longer = max(len(answer), len(wanted))
    if longer == 0:
        return 1.0
    return sum(a == w for a, w in zip(answer, wanted, strict=False)) / longer


def overlap(piece: str, wanted: list[str]) -> int:
    """Size of the multiset intersection."""
    return (Counter(piece) & Counter(wanted)).total()
