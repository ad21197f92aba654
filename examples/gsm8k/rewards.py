"""What the GSM8K team is rewarded for.

Exact match alone is no signal at 135M parameters (2 % of samples, so 94 of 100 groups of four have
no variance). Solver and refiner therefore earn, besides 1.0 for the right number, 0.3 x the share
of the gold solution's intermediate results that they found, 0.1 x the share of their own equations
that are true, and 0.1 for ending in `Answer: N`. The verifier is judged by whether it recognises a
draft whose equations are all true, not by whether the answer is right: 3 of 100 are.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from flexmarl.rollout.number_text import DIGITS, final_answer, numbers
from flexmarl.rollout.workflow import FinishedSample, Rewards

MAX_EQUATIONS = 12
"""Equations looked at: the share of true ones is not raised by a long tail of trivial ones."""

_ENDING = re.compile(rf"(?:^|\s)Answer: [-\u2212]?\$?(?:{DIGITS})\s*\Z")
_GOLD_STEP = re.compile(r"<<[^<>]*=([^<>=]+)>>")
_TERM = rf"\(*\s*\$?(?:{DIGITS})%?\s*\)*"
_RESULT = rf"[-\u2212]?\s?(?:\$\s?[-\u2212]?)?(?:{DIGITS})%?"
_EQUATION = re.compile(rf"({_TERM}(?:\s*[-+*/x\u00d7\u00f7\u2212]\s*{_TERM})+)\s*=\s*({_RESULT})")
# What people mean by yes and no; the first such word counts.
_VERDICT = re.compile(
    r"\b(?:(yes|true|correct|right)|(no|not|false|incorrect|wrong|isn't|aren't))\b", re.IGNORECASE
)
_PLAIN = str.maketrans({"\u00d7": "*", "x": "*", "\u00f7": "/", "\u2212": "-", "$": "", ",": ""})

_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def reward(sample: FinishedSample) -> Rewards:
    """Scores each agent by its own text; the team by the refiner's."""
    draft, verdict, final = (sample.one(agent) for agent in ("solver", "verifier", "refiner"))
    gold = sample.query["answer"]
    team = solution_reward(final.text, gold, ended=final.finish_reason == "stop")
    return Rewards(
        team=team,
        agents={
            "solver": solution_reward(draft.text, gold, ended=draft.finish_reason == "stop"),
            "verifier": verdict_reward(verdict.text, draft.text),
            "refiner": team,
        },
        metrics={"exact": float(is_exact(final.text, gold))},
    )


def solution_reward(text: str, gold: str, *, ended: bool) -> float:
    """The shaped reward of a solution, in [0, 1.5].

    Args:
        text: What the agent wrote.
        gold: The dataset's answer: steps with `<<48/2=24>>`, and `#### 72` at the end.
        ended: Whether the text ended by itself, not at its limit.
    """
    return (
        1.0 * is_exact(text, gold)
        + 0.3 * steps_found(text, gold)
        + 0.1 * true_share(text)
        + 0.1 * bool(ended and _ENDING.search(text))
    )


def verdict_reward(text: str, draft: str) -> float:
    """1 for the right verdict on the draft's equations, 0.1 for a wrong one, 0 for none."""
    found = _VERDICT.search(text)
    if found is None:
        return 0.0
    return 1.0 if (found[1] is not None) == all_true(draft) else 0.1


def is_exact(text: str, gold: str) -> bool:
    """Whether the final answers are the same number."""
    answer = final_answer(text)
    return answer is not None and answer == final_answer(gold)


def steps_found(text: str, gold: str) -> float:
    """Share of the gold solution's intermediate results among the numbers of the text."""
    wanted = {number for step in _GOLD_STEP.findall(gold) for number in numbers(step)[:1]}
    if not wanted:
        wanted = set(numbers(gold.rpartition("####")[2])[:1])
    return len(wanted & set(numbers(text))) / len(wanted) if wanted else 0.0


def true_share(text: str) -> float:
    """Share of the text's equations that are true; 0 without any."""
    checked = equations(text)
    return sum(checked) / len(checked) if checked else 0.0


def all_true(text: str) -> bool:
    """Whether there is an equation and all of them are true."""
    checked = equations(text)
    return bool(checked) and all(checked)


def equations(text: str) -> list[bool]:
    """The truth of each written equation such as `48 / 2 = 24`, in order."""
    found = []
    for left, right in _EQUATION.findall(text):
        value, result = evaluate(left), evaluate(right)
        if value is None or result is None:
            continue
        decimals = len(right.rstrip("%").partition(".")[2]) + 2 * right.endswith("%")
        # What was rounded to its last decimal is true; whole numbers must be met exactly.
        tolerance = Fraction(1, 2 * 10**decimals) if decimals else Fraction(0)
        found.append(abs(value - result) <= tolerance)
    return found[:MAX_EQUATIONS]


def evaluate(expression: str) -> Fraction | None:
    """The value of an expression of + - * /; None when it is not one, or divides by zero."""
    plain = re.sub(r"([\d.]+)%", r"(\1/100)", expression.translate(_PLAIN)).strip()
    try:
        return _value(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))
    raise ValueError("not arithmetic")
