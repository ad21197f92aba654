"""Workflows of the shapes that multi-agent programs take; copied into the tests' run as `team`.

Each is an ordinary async function; `team` runs the one that the query names. What agents answer is
in `shapes.respond`: answers decide about branches and loops, as they do in life.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from flexmarl.rollout.workflow import Context, Output


def said(outputs: list[Output]) -> str:
    """All texts in a row."""
    return " ".join(output.text for output in outputs)


async def chain_with_skip(ctx: Context) -> Output:
    a = await ctx.call("a", text="q")
    b = await ctx.call("b", text=a)
    c = await ctx.call("c", text=b)
    return await ctx.call("d", text=c, after=a)


async def debate(ctx: Context) -> Output:
    """Three debaters, three rounds; each hears all of the round before."""
    views = await ctx.all(*(ctx.call("debater", text=f"view {n}") for n in range(3)))
    for _ in range(2):
        heard = said(views)
        views = await ctx.all(*(ctx.call("debater", text=heard, after=views) for _ in views))
    return await ctx.call("judge", text=said(views), after=views)


async def mixture_of_two_layers(ctx: Context) -> Output:
    return await _mixture(ctx, num_layers=2)


async def mixture_of_three_layers(ctx: Context) -> Output:
    return await _mixture(ctx, num_layers=3)


async def _mixture(ctx: Context, *, num_layers: int) -> Output:
    layer: list[Output] = []
    for _ in range(num_layers):
        text = said(layer) or "q"
        calls = [ctx.call("proposer", text=text, after=layer) for _ in range(2)]
        layer = await ctx.all(*calls)
    return await ctx.call("merger", text=said(layer), after=layer)


async def master_with_subagents(ctx: Context) -> Output:
    """The master's answer names whom it calls; one of those is a master, too."""
    plan = await ctx.call("master", text="shop")
    parts = await ctx.all(*(_delegate(ctx, name, plan) for name in plan.text.split()))
    return await ctx.call("master", text=said(parts), after=parts)


async def _delegate(ctx: Context, name: str, order: Output) -> Output:
    if name != "submaster":
        return await ctx.call(name, text=order)
    plan = await ctx.call("submaster", text="team", after=order)
    parts = await ctx.all(*(_delegate(ctx, part, plan) for part in plan.text.split()))
    return await ctx.call("submaster", text=said(parts), after=parts)


async def plan_execute_replan(ctx: Context) -> Output:
    plan = await ctx.call("planner", text="goal")
    done: list[Output] = []
    while plan.text != "end":
        done.append(await ctx.call("executor", text=plan))
        plan = await ctx.call("replanner", text=f"{len(done)}", after=done[-1])
    return plan


async def reflexion(ctx: Context) -> Output:
    """At most three trials; the first is found right."""
    return await _reflexion(ctx, text="easy", max_trials=3)


async def reflexion_to_the_bound(ctx: Context) -> Output:
    return await _reflexion(ctx, text="hard", max_trials=2)


async def _reflexion(ctx: Context, *, text: str, max_trials: int) -> Output:
    trial = await ctx.call("actor", text=text)
    for number in range(1, max_trials):
        verdict = await ctx.call("evaluator", text=f"{text} {number}", after=trial)
        if verdict.text == "ok":
            break
        lesson = await ctx.call("reflector", text=trial, after=verdict)
        trial = await ctx.call("actor", text=lesson)
    return trial


async def panel(ctx: Context) -> Output:
    """One agent, four times, on the same question; a chair takes all in."""
    votes = await ctx.all(*(ctx.call("judge", text="vote") for _ in range(4)))
    return await ctx.call("chair", text=said(votes), after=votes)


async def write_verify_revise(ctx: Context) -> Output:
    """The plan says how many parts there are; a part that fails its check is revised once."""
    plan = await ctx.call("planner", text="parts")
    parts = await ctx.all(*(_part(ctx, plan, number) for number in range(int(plan.text))))
    return await ctx.call("editor", text=said(parts), after=parts)


async def _part(ctx: Context, plan: Output, number: int) -> Output:
    draft = await ctx.call("writer", text=f"part {number}", after=plan)
    verdict = await ctx.call("verifier", text=f"part {number}", after=draft)
    if verdict.text == "ok":
        return draft
    return await ctx.call("writer", text=f"again {number}", after=[draft, verdict])


async def hand_off_triangle(ctx: Context) -> Output:
    """Three agents hand a task on; who has it says who is next."""
    name, text, last = "sales", "task", None
    while True:
        last = await ctx.call(name, text=text, after=last)
        if last.text == "end":
            return last
        name, text = last.text, f"from {name}"


async def two_loops_through_one_node(ctx: Context) -> list[str]:
    """A, then B and C, then O, which sends to X or Y and back, until it says E."""
    order = ["a"]
    a = await ctx.call("a", text="q")
    arms = await ctx.all(ctx.call("b", text=a), ctx.call("c", text=a))
    order += ["b", "c"]
    before = arms
    while True:
        decision = await ctx.call("o", text=" ".join(order), after=before)
        order.append("o")
        before = [await ctx.call(decision.text, text="go", after=decision)]
        order.append(decision.text)
        if decision.text == "e":
            return order


async def generator_limiter_reviewer(ctx: Context) -> Output:
    """The limiter has a forward parent and a loop parent; it waits for the one that calls it."""
    text = await ctx.call("generator", text="q")
    while True:
        short = await ctx.call("limiter", text=text)
        review = await ctx.call("reviewer", text=f"of {text.agent}", after=short)
        if review.text == "ok":
            return await ctx.call("summary", text=review)
        text = review


async def tree_reduce(ctx: Context) -> Output:
    leaves = await ctx.all(*(ctx.call("leaf", text=f"n {n}") for n in range(5)))
    while len(leaves) > 1:
        pairs = [leaves[n : n + 2] for n in range(0, len(leaves), 2)]
        leaves = await ctx.all(*(_reduce(ctx, pair) for pair in pairs))
    return leaves[0]


async def _reduce(ctx: Context, pair: list[Output]) -> Output:
    if len(pair) == 1:
        return pair[0]
    return await ctx.call("reducer", text=said(pair), after=pair)


async def self_loop_and_outer_loop(ctx: Context) -> Output:
    """A refiner repeats itself until it is content; a critic may send the whole back, once."""
    text = await ctx.call("refiner", text="start 0")
    for outer in range(2):
        for inner in range(1, 3):
            text = await ctx.call("refiner", text=f"outer {outer} inner {inner}", after=text)
            if text.text == "ok":
                break
        critic = await ctx.call("critic", text=f"outer {outer}", after=text)
        if critic.text == "ok":
            return critic
        text = critic
    return text


async def first_of_three(ctx: Context) -> Output:
    """`any`: the quickest is taken, the others are cut."""
    first = await ctx.any(*(ctx.call("racer", text=f"lane {n}") for n in range(3)))
    return await ctx.call("chair", text=first)


async def as_ready(ctx: Context) -> list[str]:
    """`each`: whoever comes is passed on at once."""
    order: list[str] = []
    racers = [ctx.call("racer", text=f"each {n}") for n in range(3)]
    async for racer in ctx.each(*racers):
        order.append(racer.path)
        await ctx.call("clerk", text="note", after=racer, key=f"for-{racer.path[-1]}")
    return order


SHAPES: dict[str, Callable[[Context], Awaitable[Any]]] = {
    shape.__name__: shape
    for shape in (
        chain_with_skip,
        debate,
        mixture_of_two_layers,
        mixture_of_three_layers,
        master_with_subagents,
        plan_execute_replan,
        reflexion,
        reflexion_to_the_bound,
        panel,
        write_verify_revise,
        hand_off_triangle,
        two_loops_through_one_node,
        generator_limiter_reviewer,
        tree_reduce,
        self_loop_and_outer_loop,
        first_of_three,
        as_ready,
    )
}


async def team(ctx: Context, query: dict[str, str]) -> Any:
    """Runs the shape that the query names."""
    return await SHAPES[query["shape"]](ctx)


def reward(sample: Any) -> float:
    """Of no meaning here."""
    return float(len(sample.calls))
