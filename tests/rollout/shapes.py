"""What the shapes of `shapes_workflow` must come to: every vertex with its edges, the longest path.

A vertex is written `path agent <- upstream paths`.
"""

from __future__ import annotations

ROLES = [
    "a",
    "b",
    "c",
    "d",
    "o",
    "x",
    "y",
    "e",
    "debater",
    "judge",
    "proposer",
    "merger",
    "master",
    "submaster",
    "cook",
    "stock",
    "cashier",
    "planner",
    "executor",
    "replanner",
    "actor",
    "evaluator",
    "reflector",
    "chair",
    "writer",
    "verifier",
    "editor",
    "sales",
    "support",
    "billing",
    "generator",
    "limiter",
    "reviewer",
    "summary",
    "leaf",
    "reducer",
    "refiner",
    "critic",
    "racer",
    "clerk",
]

_SAYS = {
    "master shop": "cook submaster",
    "submaster team": "stock cashier",
    "planner goal": "step",
    "planner parts": "3",
    "replanner 1": "step",
    "replanner 2": "end",
    "evaluator easy 1": "ok",
    "evaluator hard 1": "no",
    "verifier part 0": "ok",
    "verifier part 1": "no",
    "verifier part 2": "ok",
    "sales task": "support",
    "support from sales": "billing",
    "billing from support": "sales",
    "sales from billing": "end",
    "reviewer of generator": "no",
    "reviewer of reviewer": "ok",
    "refiner outer 0 inner 1": "no",
    "refiner outer 0 inner 2": "no",
    "refiner outer 1 inner 1": "ok",
    "critic outer 0": "no",
    "critic outer 1": "ok",
}


def respond(role: str, text: str) -> str:
    """What an agent answers; most say their name."""
    if role == "o":
        return "x" if "x" not in text else "y" if "y" not in text else "e"
    return _SAYS.get(f"{role} {text}", role)


EXPECTED: dict[str, list[str]] = {
    "chain_with_skip": [
        "0:0 a",
        "0:1 b <- 0:0",
        "0:2 c <- 0:1",
        "0:3 d <- 0:0 0:2",
    ],
    "debate": [
        *(f"0:{n} debater" for n in range(3)),
        *(f"0:{n} debater <- 0:0 0:1 0:2" for n in range(3, 6)),
        *(f"0:{n} debater <- 0:3 0:4 0:5" for n in range(6, 9)),
        "0:9 judge <- 0:6 0:7 0:8",
    ],
    "mixture_of_two_layers": [
        "0:0 proposer",
        "0:1 proposer",
        "0:2 proposer <- 0:0 0:1",
        "0:3 proposer <- 0:0 0:1",
        "0:4 merger <- 0:2 0:3",
    ],
    "mixture_of_three_layers": [
        "0:0 proposer",
        "0:1 proposer",
        "0:2 proposer <- 0:0 0:1",
        "0:3 proposer <- 0:0 0:1",
        "0:4 proposer <- 0:2 0:3",
        "0:5 proposer <- 0:2 0:3",
        "0:6 merger <- 0:4 0:5",
    ],
    "master_with_subagents": [
        "0:0 master",
        "0.0:0 cook <- 0:0",
        "0.1:0 submaster <- 0:0",
        "0.1.0:0 stock <- 0.1:0",
        "0.1.1:0 cashier <- 0.1:0",
        "0.1:1 submaster <- 0.1.0:0 0.1.1:0",
        "0:1 master <- 0.0:0 0.1:1",
    ],
    "plan_execute_replan": [
        "0:0 planner",
        "0:1 executor <- 0:0",
        "0:2 replanner <- 0:1",
        "0:3 executor <- 0:2",
        "0:4 replanner <- 0:3",
    ],
    "reflexion": [
        "0:0 actor",
        "0:1 evaluator <- 0:0",
    ],
    "reflexion_to_the_bound": [
        "0:0 actor",
        "0:1 evaluator <- 0:0",
        "0:2 reflector <- 0:1 0:0",
        "0:3 actor <- 0:2",
    ],
    "panel": [
        *(f"0:{n} judge" for n in range(4)),
        "0:4 chair <- 0:0 0:1 0:2 0:3",
    ],
    "write_verify_revise": [
        "0:0 planner",
        *(f"0.{n}:0 writer <- 0:0" for n in range(3)),
        *(f"0.{n}:1 verifier <- 0.{n}:0" for n in range(3)),
        "0.1:2 writer <- 0.1:0 0.1:1",
        "0:1 editor <- 0.0:0 0.1:2 0.2:0",
    ],
    "hand_off_triangle": [
        "0:0 sales",
        "0:1 support <- 0:0",
        "0:2 billing <- 0:1",
        "0:3 sales <- 0:2",
    ],
    "two_loops_through_one_node": [
        "0:0 a",
        "0:1 b <- 0:0",
        "0:2 c <- 0:0",
        "0:3 o <- 0:1 0:2",
        "0:4 x <- 0:3",
        "0:5 o <- 0:4",
        "0:6 y <- 0:5",
        "0:7 o <- 0:6",
        "0:8 e <- 0:7",
    ],
    "generator_limiter_reviewer": [
        "0:0 generator",
        "0:1 limiter <- 0:0",
        "0:2 reviewer <- 0:1",
        "0:3 limiter <- 0:2",
        "0:4 reviewer <- 0:3",
        "0:5 summary <- 0:4",
    ],
    "tree_reduce": [
        *(f"0:{n} leaf" for n in range(5)),
        # Tasks: five leaves, then three pairs (the last one alone), then two, then one.
        "0.5:0 reducer <- 0:0 0:1",
        "0.6:0 reducer <- 0:2 0:3",
        "0.8:0 reducer <- 0.5:0 0.6:0",
        "0.10:0 reducer <- 0.8:0 0:4",
    ],
    "self_loop_and_outer_loop": [
        "0:0 refiner",
        "0:1 refiner <- 0:0",
        "0:2 refiner <- 0:1",
        "0:3 critic <- 0:2",
        "0:4 refiner <- 0:3",
        "0:5 critic <- 0:4",
    ],
    "first_of_three": [
        "0:1 racer",
        "0:3 chair <- 0:1",
    ],
    "as_ready": [
        *(f"0:{n} racer" for n in range(3)),
        *(f"0:for-{n} clerk <- 0:{n}" for n in range(3)),
    ],
}

LONGEST: dict[str, str] = {
    "chain_with_skip": "a b c d",
    "debate": "debater debater debater judge",
    "mixture_of_two_layers": "proposer proposer merger",
    "mixture_of_three_layers": "proposer proposer proposer merger",
    "master_with_subagents": "master submaster stock submaster master",
    "plan_execute_replan": "planner executor replanner executor replanner",
    "reflexion": "actor evaluator",
    "reflexion_to_the_bound": "actor evaluator reflector actor",
    "panel": "judge chair",
    "write_verify_revise": "planner writer verifier writer editor",
    "hand_off_triangle": "sales support billing sales",
    "two_loops_through_one_node": "a c o x o y o e",
    "generator_limiter_reviewer": "generator limiter reviewer limiter reviewer summary",
    "tree_reduce": "leaf reducer reducer reducer",
    "self_loop_and_outer_loop": "refiner refiner refiner critic refiner critic",
    "first_of_three": "racer chair",
    "as_ready": "racer clerk",
}


def parse(lines: list[str]) -> dict[str, tuple[str, list[str]]]:
    """Agent and upstream paths by path."""
    graph: dict[str, tuple[str, list[str]]] = {}
    for line in lines:
        vertex, _, upstream = line.partition(" <- ")
        path, agent = vertex.split()
        graph[path] = (agent, upstream.split())
    return graph


def longest(graph: dict[str, tuple[str, list[str]]]) -> str:
    """Agents along the longest path; of equal ones the last by name."""
    best: dict[str, list[str]] = {}

    def to(path: str) -> list[str]:
        if path not in best:
            agent, upstream = graph[path]
            before = max((to(u) for u in upstream), key=lambda p: (len(p), p), default=[])
            best[path] = [*before, agent]
        return best[path]

    return " ".join(max((to(path) for path in graph), key=lambda p: (len(p), p)))
